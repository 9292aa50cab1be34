// @ts-check
// The scheduler, visible: the batch of each step, and the tree.

import { h } from "./dom.js";
import { Lanes } from "./lanes.js";
import { Stream } from "./stream.js";
import { Strip } from "./strip.js";
import { CHANGED } from "./theme.js";
import { Tree } from "./tree.js";

/** @returns {import("./main.js").View} */
export function schedulerView() {
  const strip = new Strip();
  const tree = new Tree();
  const state = h("p", { class: "error", role: "alert" });
  state.hidden = true;
  let engine = 0;
  /** What each engine told; all tell, one is shown. @type {Map<number, {lanes: Lanes, tree: any}>} */
  const told = new Map();
  const choose = h("select", { "aria-label": "Engine", onchange: () => {
    engine = Number(choose.value);
    strip.show(of(engine).lanes);
    tree.show(of(engine).tree);
  } });
  choose.hidden = true;
  const legend = h("p", { class: "legend" }, 
    h("span", { class: "sign-prefill", title: "Tokens of a prompt that this step computes." }, "prefill chunk"),
    h("span", { class: "sign-cached", title: "The part of the request that was in the prefix cache and is not computed." }, "its cached share"),
    h("span", { class: "sign-decode", title: "The next token of an answer." }, "decode"),
    h("span", { class: "sign-end" }, "end"),
    h("span", { class: "sign-retracted", title: "The request lost its pages to others; it waits and goes on later." }, "retracted"),
    h("span", {}, "each lane and hue is one request"));

  /** @param {string} event @param {any} data */
  function took(event, data) {
    if (event === "stats") {
      engines(data.engines);
    } else if (event === "steps") {
      of(data.engine).lanes.take(data.steps, data.left_out);
      if (data.engine === engine) strip.draw();
    } else if (event === "tree") {
      of(data.engine).tree = data;
      if (data.engine === engine) tree.show(data);
    }
  }

  /** @param {number} one */
  function of(one) {
    const found = told.get(one) ?? { lanes: new Lanes(), tree: null };
    told.set(one, found);
    return found;
  }

  /** @param {any[]} all */
  function engines(all) {
    choose.hidden = all.length < 2;
    if (choose.options.length === all.length) return;
    choose.replaceChildren(...all.map((one) => h("option", { value: one.engine }, `Engine ${one.engine}`)));
    choose.value = String(engine);
  }

  const stream = new Stream("stats/stream?steps=1&tree=1", {
    took,
    state: (text) => {
      state.hidden = !text;
      state.textContent = text;
    },
  });
  strip.show(of(engine).lanes);
  window.addEventListener(CHANGED, () => strip.draw());
  const element = h("section", { class: "live", "aria-label": "The scheduler" }, state,
    h("div", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "Steps"), choose), legend, strip.element),
    h("div", { class: "card" }, h("h2", {}, "Prefix tree"), tree.element));
  return { element, start: () => stream.start(), stop: () => stream.stop() };
}
