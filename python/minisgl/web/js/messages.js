// @ts-check
// The messages of a conversation and what can be done with each.

import { AnswerView } from "./answer.js";
import { button, copy, h } from "./dom.js";
import { view } from "./pictures.js";
import { called } from "./request.js";

/** @typedef {import("./store.js").Message} Message */
/**
 * @typedef {object} Actions
 * @property {(index: number, text: string) => void} edit
 * @property {(index: number) => void} again
 * @property {(index: number, which: number) => void} choose
 * @property {(index: number, which: number, kind: "curl" | "python") => void} copyAs
 * @property {(results: Message[]) => void} results
 */

/**
 * One that cannot be shown says so in its place: it is kept in the browser, and the others are none the worse for it.
 * @param {Message} message @param {number} index @param {Actions} actions
 * @returns {{element: HTMLElement, views: AnswerView[]}}
 */
export function messageView(message, index, actions) {
  try {
    return viewOf(message, index, actions);
  } catch (error) {
    const text = h("div", { class: "plain" }, JSON.stringify(message, null, 2));
    return { element: h("article", { class: "message" }, h("p", { class: "error", role: "alert" }, `This message cannot be shown: ${error}`), text), views: [] };
  }
}

/** @param {Message} message @param {number} index @param {Actions} actions @returns {{element: HTMLElement, views: AnswerView[]}} */
function viewOf(message, index, actions) {
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

/** A form for what the called tools gave: all of it goes at once, or the model would miss the rest. @param {Message} message @param {Actions} actions */
export function resultForm(message, actions) {
  const calls = called(message);
  const inputs = calls.map((call) => h("textarea", { rows: 2, "aria-label": `What ${call.name} gave` }));
  const several = calls.length > 1;
  const send = button(`Send what the tool${several ? "s" : ""} gave`, several ? "Send results" : "Send result", () =>
    actions.results(calls.map((call, i) => ({ role: "tool", text: inputs[i].value, toolCallId: call.id }))));
  const fields = calls.map((call, i) => h("label", {}, h("span", {}, `What ${call.name} gave:`), inputs[i]));
  return calls.length ? h("div", { class: "result" }, fields, send) : null;
}

/** @param {Message} message @param {number} index @param {number} which @param {Actions} actions */
function choice(message, index, which, actions) {
  const input = h("input", { type: "radio", name: `chosen-${index}`, checked: (message.chosen ?? 0) === which });
  input.addEventListener("change", () => actions.choose(index, which));
  return h("label", { class: "choice" }, input, which ? "Second settings" : "First settings");
}

/** @param {Message} message @param {number} index @param {Actions} actions */
function asked(message, index, actions) {
  const text = message.text || !message.pictures ? h("div", { class: "plain" }, message.text) : "";
  const pictures = message.pictures ? h("div", { class: "pictures" }, message.pictures.map(view)) : "";
  const element = h("article", { class: `message ${message.role}`, "aria-label": message.role === "tool" ? "Result of a tool" : "You" }, pictures, text);
  if (message.role !== "user") return element;
  const edit = () => {
    const input = h("textarea", { rows: Math.min(12, message.text.split("\n").length + 1), value: message.text, "aria-label": "Edit your message" });
    const done = () => actions.edit(index, input.value);
    input.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        done();
      } else if (event.key === "Escape") element.replaceChildren(pictures, text, row);
    });
    element.replaceChildren(pictures, input, h("div", { class: "foot" },
      button("Send the edited message", "Send", done, { class: "primary" }),
      button("Keep the message as it was", "Cancel", () => element.replaceChildren(pictures, text, row))));
    input.focus();
  };
  const row = h("div", { class: "foot" }, button("Edit this message", "Edit", edit, { class: "quiet" }), button("Copy this message", "Copy", () => copy(message.text), { class: "quiet" }));
  element.append(row);
  return element;
}
