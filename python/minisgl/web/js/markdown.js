// @ts-check
// Markdown of a model, as it grows. The text is hostile: HTML in it is shown as text, links lead to http, https and mail
// only, pictures become links, and what is left goes through DOMPurify with a short list of tags.

import { Marked } from "../vendor/marked.js";
import DOMPurify from "../vendor/purify.js";
import { button, copy, h } from "./dom.js";

const ENTITIES = /** @type {Record<string, string>} */ ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" });
const CLEAN = {
  ALLOWED_TAGS: ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol", "li", "a", "table", "thead", "tbody", "tr", "th", "td"],
  ALLOWED_ATTR: ["href", "title", "class", "align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** @param {string} text */
function escaped(text) {
  return text.replace(/[&<>"']/g, (one) => ENTITIES[one]);
}

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: (/** @type {any} */ { text }) => escaped(text),
    image: (/** @type {any} */ { href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: (/** @type {any} */ { checked }) => (checked ? "\u2611 " : "\u2610 "),
  },
});

/** @param {string} text @returns {DocumentFragment} */
export function rendered(text) {
  const found = /** @type {any} */ (DOMPurify).sanitize(marked.parse(text), CLEAN);
  for (const link of found.querySelectorAll("a")) {
    link.rel = "noopener noreferrer nofollow";
    link.target = "_blank";
  }
  for (const one of found.querySelectorAll("[class]")) {
    if (!/^language-[\w+#.-]+$/.test(one.className)) one.removeAttribute("class");
  }
  for (const pre of found.querySelectorAll("pre")) {
    const language = pre.querySelector("code")?.className.replace("language-", "") ?? "";
    const head = h("div", { class: "code-head" }, h("span", {}, language), button("Copy this code", "Copy", () => copy(pre.textContent ?? "")));
    const box = h("div", { class: "code" });
    pre.replaceWith(box);
    pre.setAttribute("tabindex", "0"); // wide code is scrolled by keyboard, too
    box.append(head, pre);
  }
  return found;
}

/**
 * Where the last whole block of `text` ends, from `from` on, where a block begins: after an empty line, or after the end
 * of fenced code. Blocks before it do not change any more.
 * @param {string} text @param {number} from
 */
export function lastBorder(text, from) {
  let border = from;
  let fence = "";
  let at = from;
  for (;;) {
    const end = text.indexOf("\n", at);
    if (end < 0) return border;
    const line = text.slice(at, end);
    const mark = /^ {0,3}(`{3,}|~{3,})(.*)$/.exec(line);
    at = end + 1;
    if (fence) {
      if (mark && mark[1].startsWith(fence) && !mark[2].trim()) {
        fence = "";
        border = at;
      }
    } else if (mark && !(mark[1][0] === "`" && mark[2].includes("`"))) fence = mark[1];
    else if (!line.trim()) border = at;
  }
}

/** Text that grows. Whole blocks are Markdown; what is being written is plain until its block is whole. */
export class Growing {
  #from = 0;
  #shown = 0;
  #tail = document.createTextNode("");

  constructor() {
    this.element = h("div", { class: "markdown" });
    this.rest = h("div", { class: "tail" });
    this.rest.append(this.#tail);
    this.element.append(this.rest);
  }

  /** @param {string} text all of it */
  show(text) {
    if (text.indexOf("\n", this.#shown) >= 0) { // else no block can have ended
      const border = lastBorder(text, this.#from);
      if (border > this.#from) {
        this.rest.before(rendered(text.slice(this.#from, border)));
        this.#from = border;
        this.#tail.data = "";
        this.#shown = border;
      }
    }
    this.#tail.appendData(text.slice(this.#shown));
    this.#shown = text.length;
  }

  /** Once more in one: lists go on over empty lines. @param {string} text */
  end(text) {
    this.element.replaceChildren(rendered(text));
  }
}
