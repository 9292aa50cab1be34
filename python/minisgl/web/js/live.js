// @ts-check
// What the server does: figures, lines over time, the pages of the cache, the engines of a pool.

import { h } from "./dom.js";
import { Plot } from "./plots.js";
import { Stream, number, time } from "./stream.js";

const PAGES = ["protected", "held", "cached", "free"];
/** What the words mean. @type {Record<string, string>} */
const WORDS = {
  protected: "In the prefix tree, and read by running requests or pinned: not evicted.",
  held: "Written by running requests, and not in the prefix tree yet.",
  cached: "In the prefix tree, and read by nobody: evicted when pages are needed.",
  free: "Empty.",
  pinned: "Those of the protected pages that belong to stored prefixes.",
};
/** id, label, how it is read @type {[string, string, (s: any) => string][]} */
const FIGURES = [
  ["running", "Running", (s) => number(s.requests.running)],
  ["waiting", "Waiting", (s) => number(s.requests.waiting)],
  ["out", "Tokens/s out", (s) => number(s.rates.generated_tokens)],
  ["in", "Tokens/s in", (s) => number(s.rates.prompt_tokens)],
  ["ttft", "First token, p50 / p99", (s) => `${time(s.ttft_s.p50)} / ${time(s.ttft_s.p99)}`],
  ["itl", "Between tokens, p50 / p99", (s) => `${time(s.itl_s.p50)} / ${time(s.itl_s.p99)}`],
  ["hits", "Prefix hits", (s) => (s.hit_rate === null ? "\u2013" : `${(100 * s.hit_rate).toFixed(0)}%`)],
  ["retractions", "Retractions", (s) => number(s.retractions_total)],
  ["pauses", "Longest pause, server / engine", (s) => `${time(s.pauses?.server_s)} / ${time(s.pauses?.engine_s)}`],
];

/** @returns {import("./main.js").View} */
export function liveView() {
  const state = h("p", { class: "error", role: "alert" });
  state.hidden = true;
  const cells = FIGURES.map(([id, label]) => h("div", { class: "figure" }, h("dt", {}, label), h("dd", { id: `figure-${id}` }, "\u2013")));
  const tokens = new Plot("Tokens", "per second", ["out", "in (right axis)", "of them cached"], 1);
  const requests = new Plot("Requests", "", ["running", "waiting"]);
  const latency = new Plot("Latency", "ms, p50", ["first token", "between tokens"]);
  const steps = new Plot("Time of a step", "ms", ["forward", "schedule", "commit", "send"]);
  const bar = h("div", { class: "pages", role: "img" });
  const legend = h("p", { class: "legend" });
  const words = h("details", { class: "words" }, h("summary", {}, "What the words mean"), h("dl", {}, Object.entries(WORDS).flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])));
  const engines = h("tbody");
  const heads = ["Engine", "State", "Running", "Waiting", "Pages free", "Cached", "Restarts"];
  const table = h("table", { class: "engines" }, h("thead", {}, h("tr", {}, heads.map((one) => h("th", { scope: "col" }, one)))), engines);

  /** @param {any} s */
  function took(s) {
    FIGURES.forEach(([, , text], i) => (cells[i].lastChild.textContent = text(s)));
    const at = s.at_ms / 1000;
    tokens.add(at, [s.rates.generated_tokens, s.rates.prompt_tokens, s.rates.cached_tokens]);
    requests.add(at, [s.requests.running, s.requests.waiting]);
    latency.add(at, [s.ttft_s.p50, s.itl_s.p50].map((one) => (one === null ? null : 1000 * one)));
    steps.add(at, ["forward", "schedule", "commit", "send"].map((name) => s.step?.[name] ?? null));
    pages(s.kv);
    engines.replaceChildren(...s.engines.map((/** @type {any} */ one) => h("tr", {}, [one.engine, one.state + (one.reason ? `: ${one.reason}` : ""), one.running, one.waiting, one.free, one.cached, one.restarts].map((cell) => h("td", {}, typeof cell === "number" ? number(cell) : String(cell ?? "\u2013"))))));
  }

  /** @param {any} kv */
  function pages(kv) {
    const counts = PAGES.map((name) => [name, kv[name] ?? 0]);
    bar.replaceChildren(...counts.map(([name, count]) => {
      const part = h("span", { class: `page-${name}` });
      part.style.flexGrow = String(count);
      return part;
    }));
    bar.setAttribute("aria-label", counts.map(([name, count]) => `${count} ${name}`).join(", "));
    legend.replaceChildren(...counts.map(([name, count]) => h("span", { class: `page-${name}`, title: WORDS[name] }, `${name} ${number(count)}`)), h("span", {}, `of ${number(kv.pages)} pages, ${number(kv.pinned)} pinned`));
  }

  const stream = new Stream("stats/stream", {
    took: (event, data) => event === "stats" && took(data),
    state: (text) => {
      state.hidden = !text;
      state.textContent = text;
    },
  });
  const element = h("section", { class: "live", "aria-label": "What the server does" }, state, h("dl", { class: "figures-row" }, cells), h("div", { class: "card" }, h("h2", {}, "KV cache"), bar, legend, words), h("div", { class: "plots" }, [tokens, requests, latency, steps].map((one) => one.element)), h("div", { class: "card scrolls" }, h("h2", {}, "Engines"), table));
  return { element, start: () => stream.start(), stop: () => stream.stop() };
}
