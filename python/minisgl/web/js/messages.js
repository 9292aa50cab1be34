// @ts-check
// The messages of a conversation and what can be done with each.

import { AnswerView } from "./answer.js";
import { button, copy, h } from "./dom.js";

/** @typedef {import("./store.js").Message} Message */
/**
 * @typedef {object} Actions
 * @property {(index: number, text: string) => void} edit
 * @property {(index: number) => void} again
 * @property {(index: number, which: number) => void} choose
 * @property {(index: number, which: number, kind: "curl" | "python") => void} copyAs
 * @property {(index: number, callId: string, text: string) => void} result
 */

/**
 * @param {Message} message @param {number} index @param {Actions} actions
 * @returns {{element: HTMLElement, views: AnswerView[]}}
 */
export function messageView(message, index, actions) {
  if (message.role !== "assistant") return { element: asked(message, index, actions), views: [] };
  const answers = message.answers ?? [];
  const views = answers.map((one, which) => new AnswerView(one, answers.length > 1 ? `Answer ${"AB"[which]}` : "Answer"));
  const element = h("article", { class: `message assistant${answers.length > 1 ? " compared" : ""}` });
  views.forEach((view, which) => {
    const answer = view.answer;
    view.foot.append(
      button("Copy the text", "Copy", () => copy(answer.text), { class: "quiet" }),
      button("Copy the request for curl", "curl", () => actions.copyAs(index, which, "curl"), { class: "quiet" }),
      button("Copy the request for Python", "Python", () => actions.copyAs(index, which, "python"), { class: "quiet" }),
      !which && button("Answer again", "Again", () => actions.again(index), { class: "quiet again" }),
    );
    if (answers.length > 1) view.element.prepend(choice(message, index, which, actions));
    element.append(view.element);
  });
  return { element, views };
}

/** Forms for what the called tools gave. @param {Message} message @param {number} index @param {Actions} actions */
export function resultForms(message, index, actions) {
  const calls = message.answers?.[message.chosen ?? 0]?.calls ?? [];
  return calls.map((call) => {
    const input = h("textarea", { rows: 2, "aria-label": `What ${call.name} gave` });
    const send = button("Send what the tool gave", "Send result", () => actions.result(index, call.id, input.value));
    return h("div", { class: "result" }, h("span", {}, `What ${call.name} gave:`), input, send);
  });
}

/** @param {Message} message @param {number} index @param {number} which @param {Actions} actions */
function choice(message, index, which, actions) {
  const input = h("input", { type: "radio", name: `chosen-${index}`, checked: (message.chosen ?? 0) === which });
  input.addEventListener("change", () => actions.choose(index, which));
  return h("label", { class: "choice" }, input, which ? "Second settings" : "First settings");
}

/** @param {Message} message @param {number} index @param {Actions} actions */
function asked(message, index, actions) {
  const text = h("div", { class: "plain" }, message.text);
  const element = h("article", { class: `message ${message.role}`, "aria-label": message.role === "tool" ? "Result of a tool" : "You" }, text);
  if (message.role !== "user") return element;
  const edit = () => {
    const input = h("textarea", { rows: Math.min(12, message.text.split("\n").length + 1), value: message.text, "aria-label": "Edit your message" });
    const done = () => actions.edit(index, input.value);
    input.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        done();
      } else if (event.key === "Escape") element.replaceChildren(text, row);
    });
    element.replaceChildren(input, h("div", { class: "foot" },
      button("Send the edited message", "Send", done, { class: "primary" }),
      button("Keep the message as it was", "Cancel", () => element.replaceChildren(text, row))));
    input.focus();
  };
  const row = h("div", { class: "foot" }, button("Edit this message", "Edit", edit, { class: "quiet" }), button("Copy this message", "Copy", () => copy(message.text), { class: "quiet" }));
  element.append(row);
  return element;
}
