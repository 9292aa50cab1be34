// @ts-check
// Elements from data. Text only ever becomes text nodes: nothing here reads HTML.

/** @typedef {Node | string | null | undefined | false} Child */

/**
 * @param {string} tag
 * @param {Record<string, any>} [props] `on...` are listeners, `value`, `checked` and the like properties, others attributes
 * @param {...(Child | Child[])} children
 * @returns {any} an element; `any` spares casts at every use
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "open") /** @type {any} */ (element)[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

/**
 * @param {string} label said to screen readers and as a hint
 * @param {string} text
 * @param {(event: Event) => void} onclick
 * @param {Record<string, any>} [props]
 */
export function button(label, text, onclick, props = {}) {
  return h("button", { type: "button", "aria-label": label, title: label, onclick, ...props }, text);
}

/** Say something briefly, below; screen readers hear it. @param {string} text */
export function notice(text) {
  const element = h("div", { class: "notice" }, text);
  document.getElementById("notices")?.append(element);
  setTimeout(() => element.remove(), 5000);
}

/** @param {string} text */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    notice("Copied.");
  } catch {
    const area = h("textarea", { class: "copying", value: text });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy"); // where there is no clipboard: plain HTTP to another machine
    area.remove();
    notice(done ? "Copied." : "The browser does not let this page copy.");
  }
}
