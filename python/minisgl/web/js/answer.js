// @ts-check
// One answer on the page: reasoning folded, text as Markdown or as coloured tokens, tool calls, its figures.

import { button, h } from "./dom.js";
import { figures } from "./generate.js";
import { Growing } from "./markdown.js";

/** @typedef {import("./store.js").Answer} Answer */
/** @typedef {import("./store.js").Token} Token */

export class AnswerView {
  #frame = 0;
  #text = new Growing();
  #thought = document.createTextNode("");
  #thoughts = h("details", { class: "reasoning" }, h("summary", {}, "Reasoning"), h("div", {}, this.#thought));
  #calls = h("div", { class: "calls" });
  #tokens = h("div", { class: "tokens" });
  #error = h("p", { class: "error", role: "alert" });
  #figures = h("span", { class: "figures" });
  #colours = button("Colour tokens by their probability", "Tokens", () => this.#toggle(), { class: "quiet", "aria-pressed": "false" });

  /** @param {Answer} answer @param {string} label */
  constructor(answer, label) {
    this.answer = answer;
    this.live = false;
    this.foot = h("div", { class: "foot" }, this.#figures, this.#colours);
    this.element = h("div", { class: "answer", "aria-label": label, role: "group" }, this.#thoughts, this.#text.element, this.#tokens, this.#calls, this.#error, this.foot);
    this.#tokens.hidden = true;
    this.#draw();
  }

  begin() {
    const before = this.#text.element;
    this.#text = new Growing();
    before.replaceWith(this.#text.element);
    this.live = true;
    this.element.setAttribute("aria-busy", "true");
    this.#draw();
  }

  /** More came; drawn at most once a frame, however many tokens that are. */
  changed() {
    if (!this.#frame) this.#frame = requestAnimationFrame(() => this.#draw());
  }

  end() {
    this.live = false;
    cancelAnimationFrame(this.#frame);
    this.element.removeAttribute("aria-busy");
    this.#draw();
  }

  #draw() {
    this.#frame = 0;
    const { answer } = this;
    this.#thoughts.hidden = !answer.reasoning;
    this.#thought.appendData(answer.reasoning.slice(this.#thought.length));
    if (this.live) this.#text.show(answer.text);
    else this.#text.end(answer.text);
    this.#calls.hidden = !answer.calls.length;
    if (answer.calls.length) {
      this.#calls.replaceChildren(...answer.calls.map((one) =>
        h("div", { class: "call" }, h("div", {}, "calls ", h("code", {}, one.name)), h("pre", { tabindex: 0 }, pretty(one.arguments)))));
    }
    this.#error.hidden = !answer.error;
    this.#error.textContent = answer.error ?? "";
    this.#figures.textContent = this.live ? "" : figures(answer).join(" \u00B7 ");
    this.foot.hidden = this.live;
    this.#colours.hidden = !answer.tokens?.length;
  }

  #toggle() {
    const on = this.#tokens.hidden;
    this.#colours.setAttribute("aria-pressed", String(on));
    this.#tokens.hidden = !on;
    this.#text.element.hidden = on;
    if (on) this.#tokens.replaceChildren(...letters(this.answer.tokens ?? []).map(token));
  }
}

/**
 * Tokens as they can be shown: those that are parts of one letter are one, as likely as that all of them came.
 * @param {Token[]} tokens @returns {Token[]}
 */
export function letters(tokens) {
  /** @type {Token[]} */
  const found = [];
  /** @type {Token | null} */
  let open = null;
  for (const one of tokens) {
    /** @type {number[]} */
    const bytes = [...(open?.bytes ?? []), ...(one.bytes ?? new TextEncoder().encode(one.content))];
    /** @type {Token} */
    const whole = open ? { content: new TextDecoder().decode(new Uint8Array(bytes)), logprob: open.logprob + one.logprob, top: [], bytes } : one;
    open = endsWithin(bytes) ? { ...whole, bytes } : null;
    if (!open) found.push(whole);
  }
  return open ? [...found, open] : found;
}

/** Whether more bytes belong to the last letter of UTF-8. @param {number[]} bytes */
function endsWithin(bytes) {
  for (let back = 1; back <= Math.min(3, bytes.length); back++) {
    const byte = bytes[bytes.length - back];
    if (byte < 0x80) return false;
    if (byte >= 0xc0) return back < (byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2);
  }
  return false;
}

/** @param {Token} one */
function token(one) {
  const share = Math.exp(one.logprob);
  const others = one.top.map((other) => `${JSON.stringify(other.token)} ${percent(Math.exp(other.logprob))}`);
  return h("span", { class: `p${level(share)}`, title: [`${percent(share)}`, ...others].join("\n") }, one.content);
}

/** 0: sure, 5: very unlikely. @param {number} share */
export function level(share) {
  return [0.9, 0.6, 0.3, 0.1, 0.02].filter((limit) => share < limit).length;
}

/** @param {number} share */
function percent(share) {
  return `${(100 * share).toFixed(share < 0.01 ? 2 : 1)}%`;
}

/** @param {string} text */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
