// @ts-check
// Requests to the server that gave this page, relative to it, so that a prefix before it does not matter. The key is
// asked for when the server wants one, and is kept in this tab alone.

import { h } from "./dom.js";

export const ROOT = new URL("../../", import.meta.url);
const KEY = "minisgl.key";
/** @type {Promise<void> | null} */
let asking = null;

export class ApiError extends Error {
  /** @param {string} message @param {number} status */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function key() {
  return sessionStorage.getItem(KEY);
}

/** Of several models behind this address, the one that requests without a body are for; "": there is only one. */
export const chosen = { model: "" };

export function forgetKey() {
  sessionStorage.removeItem(KEY);
}

/**
 * A response with a good status; asks for the key as often as it is wrong. Throws `ApiError` with the server's words.
 * @param {string} path
 * @param {{body?: any, signal?: AbortSignal}} [options] a body makes it a POST
 * @returns {Promise<Response>}
 */
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const used = key();
    /** @type {Record<string, string>} */
    const headers = used ? { authorization: `Bearer ${used}` } : {};
    if (body !== undefined) headers["content-type"] = "application/json";
    if (chosen.model) headers["x-minisgl-model"] = encodeURIComponent(chosen.model);
    const response = await fetch(new URL(path, ROOT), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      credentials: "same-origin",
      cache: "no-store",
    });
    if (response.ok) return response;
    if (response.status !== 401) throw new ApiError(await reason(response), response.status);
    if (key() === used) await askKey(used !== null);
    signal?.throwIfAborted();
  }
}

/** @param {Response} response */
async function reason(response) {
  try {
    const found = await response.json();
    return String(found.error.message);
  } catch {
    return `The server answered ${response.status}.`;
  }
}

/** One dialog, however many requests wait for it. @param {boolean} wasWrong */
function askKey(wasWrong) {
  asking ??= new Promise((resolve) => {
    const input = h("input", { type: "password", id: "key", autocomplete: "off", required: true });
    const use = () => {
      if (!input.value.trim()) return;
      sessionStorage.setItem(KEY, input.value.trim());
      dialog.close();
      dialog.remove();
      asking = null;
      resolve();
    };
    const dialog = h(
      "dialog",
      { class: "key", "aria-labelledby": "key-title", oncancel: (/** @type {Event} */ event) => event.preventDefault() },
      h("h2", { id: "key-title" }, "This server wants an API key"),
      wasWrong && h("p", { class: "wrong", role: "alert" }, "That key is not right."),
      h("label", { for: "key" }, "API key"),
      input,
      h("p", { class: "hint" }, "It stays in this tab and is gone when the tab is closed."),
      h("button", { type: "button", class: "primary", onclick: use }, "Use this key"),
    );
    input.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => event.key === "Enter" && use());
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}
