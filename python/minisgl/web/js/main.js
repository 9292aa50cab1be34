// @ts-check
// The frame: what is served, the three views by the address's #, the theme.

import { ApiError, chosen, request } from "./api.js";
import { chatView } from "./chat.js";
import { h } from "./dom.js";
import { liveView } from "./live.js";
import { schedulerView } from "./scheduler.js";
import { themeButton } from "./theme.js";

/** @typedef {{element: HTMLElement, start: () => void, stop: () => void}} View */

const model = { name: "", context: 0, sees: false };
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
const picker = h("select", { id: "picker", "aria-label": "Model", hidden: true, onchange: () => pick() });
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

/** @param {any} card */
function use(card) {
  Object.assign(model, { name: card.id, context: card.max_model_len, sees: card.vision === true });
  document.documentElement.classList.toggle("sees", model.sees);
  served.textContent = [card.simulated ? "simulated" : "", picker.hidden ? model.name : ""].filter(Boolean).join(": ");
  served.title = `${model.name}, context ${model.context ?? "unknown"} tokens${card.simulated ? ", simulated" : ""}`;
  served.className = card.simulated ? "ok simulated" : "ok";
}

/** Of several models: have the one that was picked loaded, and say how far that is. */
async function pick() {
  const name = (chosen.model = picker.value);
  const answer = request(`v1/models/${encodeURIComponent(name)}/load`, { body: {} });
  const bar = h("progress", { "aria-label": `${name} is being loaded` });
  let card = /** @type {any} */ (null);
  answer.then(async (response) => (card = await response.json()), (error) => (card = { id: name, failure: error.message }));
  while (card === null && picker.value === name) {
    served.replaceChildren(bar, ` ${name}: loading`);
    await new Promise((resolve) => setTimeout(resolve, 200));
    const cards = (await (await request("v1/models")).json()).data;
    const doing = cards.find((/** @type {any} */ one) => one.id === name)?.doing;
    if (card === null && doing) served.replaceChildren(bar, ` ${name}: ${doing}`);
  }
  if (picker.value !== name) return;
  use(card);
  if (card.failure) Object.assign(served, { className: "bad", textContent: card.failure });
  shown?.stop(); // what it watches is another server from now on
  shown?.start();
}

/** @param {any[]} cards those of all models */
function offer(cards) {
  picker.hidden = cards.length < 2 || !cards[0].state;
  if (picker.hidden) return cards[0];
  picker.replaceChildren(...cards.map((one) => h("option", { value: one.id }, one.id)));
  const first = cards.find((one) => one.state === "loaded") ?? cards[0];
  picker.value = chosen.model = first.id;
  return first;
}

async function connect() {
  for (;;) {
    try {
      use(offer((await (await request("v1/models")).json()).data));
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
  picker,
  themeButton(),
);
window.addEventListener("hashchange", show);
show();
connect();
