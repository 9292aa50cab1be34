// @ts-check
// Light, dark, or as the system has it; kept in this browser.

import { button } from "./dom.js";

const NAME = "minisgl.theme";
const ORDER = ["system", "light", "dark"];
const SIGNS = /** @type {Record<string, string>} */ ({ system: "\u25D0", light: "\u2600", dark: "\u263E" });
export const CHANGED = "minisgl-theme";

export function themeButton() {
  let now = localStorage.getItem(NAME) ?? "system";
  const found = button("", "", () => set(ORDER[(ORDER.indexOf(now) + 1) % ORDER.length]), { class: "quiet", id: "theme" });
  /** @param {string} name */
  function set(name) {
    now = ORDER.includes(name) ? name : "system";
    localStorage.setItem(NAME, now);
    if (now === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = now;
    found.textContent = SIGNS[now];
    found.title = `Colours: ${now}`;
    found.setAttribute("aria-label", found.title);
    window.dispatchEvent(new Event(CHANGED));
  }
  set(now);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new Event(CHANGED)));
  return found;
}

/** A colour of the style sheet, for a canvas. @param {string} name */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
