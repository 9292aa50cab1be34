// @ts-check
// Lines over the last minutes, in the colours of the page.

import { h } from "./dom.js";
import { CHANGED, colour } from "./theme.js";

const Lines = /** @type {any} */ (globalThis).uPlot; // vendor/uplot.js
const KEPT = 300; // points: five minutes
const HEIGHT_PX = 150;

export class Plot {
  /** @type {(number | null)[][]} */
  #data;
  /** @type {any} */
  #plot = null;
  #box = h("div", { class: "plot-box" });

  /** @param {string} title @param {string} unit @param {string[]} names of the lines @param {number} [right] the first line that has the axis on the right; without: none */
  constructor(title, unit, names, right = names.length) {
    this.names = names;
    this.right = right;
    this.#data = [[], ...names.map(() => [])];
    const key = names.map((name, i) => h("span", { class: `key-${i + 1}` }, name));
    this.element = h("figure", { class: "plot" }, h("figcaption", {}, h("b", {}, title), h("span", { class: "unit" }, unit), h("span", { class: "keys" }, key)), this.#box);
    new ResizeObserver(() => this.#plot?.setSize({ width: this.#box.clientWidth, height: HEIGHT_PX })).observe(this.#box);
    window.addEventListener(CHANGED, () => this.#make());
  }

  /** @param {number} at seconds @param {(number | null)[]} values */
  add(at, values) {
    [at, ...values].forEach((value, i) => {
      this.#data[i].push(value ?? null);
      if (this.#data[i].length > KEPT) this.#data[i].shift();
    });
    if (this.#plot) this.#plot.setData(this.#data);
    else this.#make();
  }

  #make() {
    if (!this.#box.isConnected || !this.#data[0].length) return;
    this.#plot?.destroy();
    const axis = { stroke: colour("dim"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    this.#plot = new Lines({
      width: this.#box.clientWidth,
      height: HEIGHT_PX,
      legend: { show: false },
      cursor: { show: false },
      padding: [8, 8, 0, 0],
      scales: { y: { range: fromZero }, right: { range: fromZero } },
      axes: [{ ...axis, size: 24, space: 80, incrs: [1, 2, 5, 10, 15, 30, 60, 120], values: (/** @type {any} */ _, /** @type {number[]} */ all) => all.map((at) => new Date(at * 1000).toLocaleTimeString("en-GB")) }, { ...axis, size: 52 }, ...(this.right < this.names.length ? [{ ...axis, scale: "right", side: 1, size: 52, grid: { show: false } }] : [])],
      series: [{}, ...this.names.map((name, i) => ({ label: name, scale: i < this.right ? "y" : "right", stroke: colour(`series-${i + 1}`), width: 1.75, points: { show: false } }))],
    }, this.#data, this.#box);
  }
}

/** @param {any} _ @param {number} _low @param {number} high */
function fromZero(_, _low, high) {
  return [0, high > 0 ? high * 1.1 : 1];
}
