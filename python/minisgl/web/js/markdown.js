// @ts-check
// Markdown of a model, as it grows. The text is hostile: HTML in it is shown as text, links lead to http, https and mail
// only, pictures become links, and what is left goes through DOMPurify with a short list of tags. The parser recurses
// for each level of nesting and takes time that grows with the square of a paragraph's marks: what would take it long, or
// makes it throw, is shown as plain text.

import { Lexer, Marked } from "../vendor/marked.js";
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

const MAX_CHARS = 1 << 18;
const MAX_MARKS = 4000; // of lines that follow each other: 0.2 s at worst
const MAX_WORK = 4 * MAX_MARKS ** 2; // of the squares of all blocks' marks: a second or two at worst
const MAX_BEGINNING = 200; // marks and spaces that a line begins with

/** Letters, digits and the spaces behind them are none. @param {string} text */
function numMarks(text) {
  return text.replace(/[\p{L}\p{N}]+ ?/gu, "").length;
}

/** Whether the parser may take long. Code between fences costs nothing. @param {string} text */
export function isHeavy(text) {
  if (text.length > MAX_CHARS) return true;
  let fence = "";
  let marks = 0;
  for (const line of text.split("\n")) {
    fence = fenceAfter(line, fence);
    if (fence || !line.trim()) {
      marks = 0;
      continue;
    }
    marks += numMarks(line);
    if (marks > MAX_MARKS || (/^[\s>*+.)\d-]*/.exec(line)?.[0].length ?? 0) > MAX_BEGINNING) return true;
  }
  return false;
}

/** @param {string} text @returns {DocumentFragment | HTMLElement} */
export function rendered(text) {
  if (isHeavy(text)) return h("div", { class: "plain" }, text);
  try {
    return parsed(text);
  } catch {
    return h("div", { class: "plain" }, text);
  }
}

/**
 * As HTML. The blocks are the parser's own, for it does not see each fence that `isHeavy` sees: those of HTML it does
 * not. Throws if their marks would take long, all together.
 * @param {string} text
 */
function html(text) {
  const lexer = new Lexer(marked.defaults);
  lexer.blockTokens(text.replace(/\r\n?/g, "\n"), lexer.tokens);
  const work = lexer.inlineQueue.reduce((/** @type {number} */ sum, /** @type {any} */ { src }) => sum + numMarks(src) ** 2, 0);
  if (work > MAX_WORK) throw new RangeError("too many marks");
  for (const { src, tokens } of lexer.inlineQueue) {
    lexer.state.inRawBlock = false; // or the text behind a <code> that nothing closes would not be escaped
    lexer.inlineTokens(src, tokens);
  }
  return marked.parser(lexer.tokens);
}

/** @param {string} text @returns {DocumentFragment} */
function parsed(text) {
  const found = /** @type {any} */ (globalThis).DOMPurify.sanitize(html(text), CLEAN);
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
  let list = false; // an empty line does not end one
  let empty = false;
  let at = from;
  for (;;) {
    const end = text.indexOf("\n", at);
    if (end < 0) return border;
    const line = text.slice(at, end);
    const before = fence;
    fence = fenceAfter(line, before);
    if (line.trim() && !before) {
      const item = /^ {0,3}(?:[-*+]|\d{1,9}[.)])[ \t]/.test(line);
      if (list && empty && !item && /^\S/.test(line)) {
        border = at;
        list = false;
      }
      list ||= item;
    }
    empty = !line.trim();
    at = end + 1;
    if (!fence && !list && (before || empty)) border = at;
  }
}

/** The fence of the code that is open behind a line, or nothing. @param {string} line @param {string} fence before it */
function fenceAfter(line, fence) {
  const mark = /^ {0,3}(`{3,}|~{3,})(.*)$/.exec(line);
  if (!mark) return fence;
  if (fence) return mark[1].startsWith(fence) && !mark[2].trim() ? "" : fence;
  return mark[1][0] === "`" && mark[2].includes("`") ? "" : mark[1];
}

const LONGEST = 20_000; // letters of a block that is parsed again at each frame

/** A block that is being written, with the marks closed that its end leaves open. @param {string} text */
export function closed(text) {
  let fence = "";
  for (const line of text.split("\n")) fence = fenceAfter(line, fence);
  if (fence) return text;
  const from = text.lastIndexOf("\n\n") + 1;
  let last = text.slice(from).replace(/(?<![*_`~\\])(?:\*{1,3}|_{1,3}|`|~~)$/, ""); // one that has just begun
  for (const mark of ["`", "**"]) if (last.split(mark).length % 2 === 0) last += mark;
  return text.slice(0, from) + last;
}

/** Text that grows. What is whole stays; the block that is being written is Markdown, too, and made anew each time. */
export class Growing {
  #from = 0;
  #shown = 0;
  #searched = 0;

  constructor() {
    this.element = h("div", { class: "markdown" });
    this.rest = h("div", { class: "tail" });
    this.element.append(this.rest);
  }

  /** @param {string} text all of it */
  show(text) {
    if (text.length === this.#shown) return;
    this.#shown = text.length;
    if (text.indexOf("\n", this.#searched) >= 0) { // else no block can have ended
      this.#searched = text.length;
      const border = lastBorder(text, this.#from);
      if (border > this.#from) {
        this.rest.before(rendered(text.slice(this.#from, border)));
        this.#from = border;
      }
    }
    const rest = text.slice(this.#from);
    this.rest.replaceChildren(rest.length > LONGEST ? h("div", { class: "plain" }, rest) : rendered(closed(rest)));
  }

  /** Once more in one: lists go on over empty lines. @param {string} text */
  end(text) {
    this.element.replaceChildren(rendered(text));
  }
}
