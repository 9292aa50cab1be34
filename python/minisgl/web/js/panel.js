// @ts-check
// What is asked for: system prompt, sampling, the second set of a comparison, further fields.

import { h } from "./dom.js";

/** @typedef {import("./store.js").Settings} Settings */

/** name, label, least, most, step @type {[string, string, number, number | null, number | "any"][]} */
const NUMBERS = [
  ["temperature", "Temperature", 0, 2, "any"],
  ["top_p", "Top p", 0, 1, "any"],
  ["max_tokens", "Max tokens", 1, null, 1],
  ["seed", "Seed", 0, null, 1],
  ["presence_penalty", "Presence penalty", -2, 2, "any"],
  ["frequency_penalty", "Frequency penalty", -2, 2, "any"],
];

/**
 * @param {Settings} settings changed in place
 * @param {() => void} changed
 */
export function panel(settings, changed) {
  const second = h("div", { class: "numbers" });
  const compare = check("compare", "Compare two settings, same seed", settings, () => {
    second.hidden = !settings.compare;
    if (settings.compare && settings.seed === "") {
      settings.seed = "1";
      /** @type {any} */ (first.querySelector("#set-seed")).value = "1";
    }
    changed();
  });
  const first = numbers(settings, "set", NUMBERS, changed);
  second.append(h("h3", {}, "Second settings"), numbers(settings.b, "b", NUMBERS.filter(([name]) => name !== "seed"), changed));
  second.hidden = !settings.compare;
  const extra = area("extra", "More fields of the request (JSON)", settings, changed, '{"tools": [...]}');
  extra.addEventListener("input", () => {
    const input = /** @type {any} */ (extra.querySelector("textarea"));
    input.setCustomValidity(isObject(input.value) ? "" : "This is no JSON object.");
    input.setAttribute("aria-invalid", String(!isObject(input.value)));
  });
  return h(
    "div",
    { class: "settings" },
    area("system", "System prompt", settings, changed, "none"),
    first,
    h("p", { class: "hint" }, "Empty: the model's default."),
    check("logprobs", "Ask for log probabilities", settings, changed),
    compare,
    second,
    extra,
  );
}

/** @param {string} text */
export function isObject(text) {
  try {
    const found = text.trim() ? JSON.parse(text) : {};
    return typeof found === "object" && found !== null && !Array.isArray(found);
  } catch {
    return false;
  }
}

/** @param {any} values @param {string} prefix @param {typeof NUMBERS} fields @param {() => void} changed */
function numbers(values, prefix, fields, changed) {
  return h("div", { class: "grid" }, fields.map(([name, label, least, most, step]) => {
    const id = `${prefix}-${name}`;
    const input = h("input", { id, type: "number", min: least, max: most, step, value: values[name] ?? "", placeholder: "\u2013", inputmode: "decimal" });
    input.addEventListener("input", () => {
      if (!input.validity.badInput) values[name] = input.value;
      changed();
    });
    return h("label", { for: id }, h("span", {}, label), input);
  }));
}

/** @param {string} name @param {string} label @param {any} values @param {() => void} changed @param {string} hint */
function area(name, label, values, changed, hint) {
  const input = h("textarea", { id: `set-${name}`, rows: 3, value: values[name], placeholder: hint, spellcheck: "false" });
  input.addEventListener("input", () => {
    values[name] = input.value;
    changed();
  });
  return h("label", { for: `set-${name}`, class: "wide" }, h("span", {}, label), input);
}

/** @param {string} name @param {string} label @param {any} values @param {() => void} changed */
function check(name, label, values, changed) {
  const input = h("input", { type: "checkbox", id: `set-${name}`, checked: values[name] });
  input.addEventListener("change", () => {
    values[name] = input.checked;
    changed();
  });
  return h("label", { for: `set-${name}`, class: "check" }, input, h("span", {}, label));
}
