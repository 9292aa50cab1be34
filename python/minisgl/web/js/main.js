// @ts-check
// The frame: what is served, the three views by the address's #, the theme.

import { ApiError, request } from "./api.js";
import { chatView } from "./chat.js";
import { h } from "./dom.js";
import { liveView } from "./live.js";
import { schedulerView } from "./scheduler.js";
import { themeButton } from "./theme.js";

/** @typedef {{element: HTMLElement, start: () => void, stop: () => void}} View */

const model = { name: "", context: 0 };
const MAKERS = /** @type {Record<string, [string, () => View]>} */ ({
  chat: ["Chat", () => chatView(model)],
  live: ["Live", liveView],
  scheduler: ["Scheduler", schedulerView],
});
/** @type {Record<string, View>} */
const made = {};
/** @type {View | null} */
let shown = null;

const served = h("span", { id: "served", role: "status" }, "connecting");
const links = Object.entries(MAKERS).map(([name, [label]]) => h("a", { href: `#${name}`, id: `to-${name}` }, label));

/** Views are made when they are first wanted, and stop asking the server when they are left. */
function show() {
  const name = Object.hasOwn(MAKERS, location.hash.slice(1)) ? location.hash.slice(1) : "chat";
  shown?.stop();
  shown = made[name] ??= MAKERS[name][1]();
  document.getElementById("main")?.replaceChildren(shown.element);
  for (const link of links) {
    if (link.id === `to-${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  shown.start();
}

async function connect() {
  for (;;) {
    try {
      const card = (await (await request("v1/models")).json()).data[0];
      Object.assign(model, { name: card.id, context: card.max_model_len });
      served.textContent = model.name;
      served.title = `${model.name}, context ${model.context} tokens${card.simulated ? ", simulated" : ""}`;
      served.className = "ok";
      return;
    } catch (error) {
      served.textContent = error instanceof ApiError ? error.message : "no connection";
      served.className = "bad";
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

document.getElementById("top")?.append(
  h("span", { class: "brand" }, "minisgl"),
  h("nav", { "aria-label": "Views" }, links),
  served,
  themeButton(),
);
window.addEventListener("hashchange", show);
show();
connect();
