// @ts-check
// The moving strip: a column for each step, a lane and a hue for each request, whose state is a shade: tall dark cells
// are prefill chunks, their palest part the share that was cached, low ones decodes. A retraction is a red cross, and
// nothing else is red; an end is a dot.

import { h } from "./dom.js";
import { Lanes, hue } from "./lanes.js";
import { number } from "./stream.js";
import { colour } from "./theme.js";

const COLUMN_PX = 14;
const WIDEST_PX = 40;
const MIN_LANES = 8;
const MAX_LANES = 40;
const HEIGHT_PX = 340;
const FOOT_PX = 20;
const NOTHING = "No step yet.";

export class Strip {
  #lanes = new Lanes();
  #canvas = h("canvas", { class: "strip", role: "img", tabindex: "0", "aria-label": "Steps of the scheduler" });
  #said = h("p", { class: "said" }, NOTHING);
  #frame = 0;
  #pointer = { x: -1, y: -1 };
  #column = COLUMN_PX;

  constructor() {
    this.element = h("div", {}, this.#canvas, this.#said);
    new ResizeObserver(() => this.draw()).observe(this.#canvas);
    this.#canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => this.#point(event.offsetX, event.offsetY));
    this.#canvas.addEventListener("pointerleave", () => this.#point(-1, -1));
  }

  /** From now on these: call `draw` when they have changed. @param {Lanes} lanes */
  show(lanes) {
    this.#lanes = lanes;
    this.draw();
  }

  draw() {
    if (!this.#frame) this.#frame = requestAnimationFrame(() => this.#draw());
  }

  /** @param {number} x @param {number} y */
  #point(x, y) {
    this.#pointer = { x, y };
    this.draw();
  }

  #draw() {
    this.#frame = 0;
    const width = this.#canvas.clientWidth;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    this.#canvas.width = width * scale;
    this.#canvas.height = HEIGHT_PX * scale;
    const context = /** @type {CanvasRenderingContext2D} */ (this.#canvas.getContext("2d"));
    context.scale(scale, scale);
    context.clearRect(0, 0, width, HEIGHT_PX);
    const columns = this.#lanes.columns.slice(-Math.floor(width / COLUMN_PX));
    const across = (this.#column = Math.min(WIDEST_PX, Math.max(COLUMN_PX, width / Math.max(1, columns.length))));
    const lanes = Math.min(MAX_LANES, Math.max(MIN_LANES, this.#lanes.count));
    const lane = (HEIGHT_PX - FOOT_PX) / lanes;
    const shades = { prefill: colour("shade-prefill"), decode: colour("shade-decode"), cached: colour("shade-cached") };
    context.font = "10px system-ui, sans-serif";
    columns.forEach((column, i) => {
      const x = width - (columns.length - i) * across;
      if (column.step % 10 === 0) {
        context.fillStyle = colour("grid");
        context.fillRect(x, 0, 1, HEIGHT_PX - FOOT_PX);
        context.fillStyle = colour("dim");
        context.fillText(String(column.step), x + 2, HEIGHT_PX - 6);
      }
      for (const cell of column.cells) if (cell.lane < lanes) paint(context, cell, { x, y: cell.lane * lane, width: across - 1, lane }, shades);
    });
    this.#say(columns, width, lane);
  }

  /** In words, of the step under the pointer or the last one. @param {import("./lanes.js").Column[]} columns @param {number} width @param {number} lane */
  #say(columns, width, lane) {
    const under = this.#pointer.x < 0 ? undefined : columns[columns.length - 1 - Math.floor((width - this.#pointer.x) / this.#column)];
    const column = under ?? columns.at(-1);
    if (!column) {
      this.#said.textContent = NOTHING;
      return;
    }
    const prefills = column.cells.filter((one) => one.kind === "prefill");
    const tokens = prefills.reduce((sum, one) => sum + one.tokens, 0);
    const parts = [count(column.cells.length - prefills.length, "decode"), prefills.length ? `${count(prefills.length, "prefill chunk")} of ${count(tokens, "token")}` : "no prefill"];
    let text = `Step ${number(column.step)}: ${parts.join(", ")}, ${count(column.waiting, "request")} waiting, ${count(column.free, "page")} free`;
    const cell = under?.cells.find((one) => one.lane === Math.floor(this.#pointer.y / lane));
    if (cell) text += `. Request ${cell.request % 2 ** 40}: ${cell.kind}, ${cell.tokens} new of ${cell.length}${cell.cached ? `, ${cell.cached} cached` : ""}${cell.mark ? `, ${cell.mark}` : ""}`;
    this.#said.textContent = text;
  }
}

/** @param {number} n @param {string} what */
function count(n, what) {
  return `${number(n)} ${what}${n === 1 ? "" : "s"}`;
}

/** @param {CanvasRenderingContext2D} context @param {import("./lanes.js").Cell} cell @param {{x: number, y: number, width: number, lane: number}} place @param {{prefill: string, decode: string, cached: string}} shades */
function paint(context, cell, { x, y, width, lane }, shades) {
  const height = cell.kind === "prefill" ? lane - 2 : Math.max(3, lane * 0.4);
  const top = y + (lane - height) / 2;
  if (cell.tokens) {
    context.fillStyle = `hsl(${hue(cell.request)} 60% ${shades[cell.kind]})`;
    context.fillRect(x, top, width, height);
  }
  if (cell.kind === "prefill" && cell.cached) {
    const share = height * Math.min(1, cell.cached / cell.length);
    context.fillStyle = `hsl(${hue(cell.request)} 60% ${shades.cached})`;
    context.fillRect(x, top + height - share, width, share);
  }
  if (cell.mark === "end") {
    context.fillStyle = colour("text");
    context.beginPath();
    context.arc(x + width / 2, y + lane / 2, Math.min(3, lane / 4), 0, 2 * Math.PI);
    context.fill();
  } else if (cell.mark === "retracted") {
    context.strokeStyle = colour("bad");
    context.lineWidth = 2.5;
    context.beginPath();
    context.moveTo(x + 2, y + 2);
    context.lineTo(x + width - 2, y + lane - 2);
    context.moveTo(x + width - 2, y + 2);
    context.lineTo(x + 2, y + lane - 2);
    context.stroke();
  }
}
