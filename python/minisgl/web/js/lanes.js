// @ts-check
// What the strip shows, without a canvas: each request has a lane for as long as it has a row in the batch.

/** @typedef {{lane: number, request: number, kind: "prefill" | "decode", tokens: number, cached: number, length: number, mark: "" | "end" | "retracted"}} Cell */
/** @typedef {{step: number, at: number, cells: Cell[], waiting: number, free: number, retracted: number}} Column */

const KEPT = 600;
const AGAIN_MS = 500; // an engine process takes longer to begin again
const GAP = 3; // steps: a retraction is told up to two later, and steps without rows are not

export class Lanes {
  /** @type {Map<number, number>} request -> lane */
  #lane = new Map();
  /** @type {boolean[]} */
  #taken = [];
  /** @type {Column[]} */
  columns = [];

  get count() {
    return this.#taken.length;
  }

  /** @param {any[]} steps of one event @param {number} leftOut steps before them that were not told */
  take(steps, leftOut = 0) {
    if (leftOut && steps.length) this.#forget(steps[0]);
    for (const one of steps) {
      const last = this.columns.at(-1);
      if (last && one.step <= last.step && one.at_ms <= last.at + AGAIN_MS) continue; // a server tells its recent steps to whoever comes, also again
      if (last && one.step < last.step) this.clear(); // the engine process is another one
      else if (last && one.step > last.step + GAP) this.#forget(one);
      this.columns.push(this.#column(one));
    }
    this.columns.splice(0, this.columns.length - KEPT);
  }

  clear() {
    this.#lane.clear();
    this.#taken = [];
    this.columns = [];
  }

  /** @param {any} one @returns {Column} */
  #column(one) {
    const ended = new Set(one.finished.map((/** @type {any} */ pair) => pair[0]));
    const retracted = new Set(one.retracted);
    /** @type {Cell[]} */
    const cells = one.rows.map((/** @type {any} */ [request, kind, tokens, cached, length]) => ({
      lane: this.#of(request), request, kind, tokens, cached, length, mark: retracted.has(request) ? "retracted" : ended.has(request) ? "end" : "",
    }));
    for (const request of retracted) {
      if (this.#lane.has(request) && !cells.some((cell) => cell.request === request)) {
        cells.push({ lane: this.#of(request), request, kind: "decode", tokens: 0, cached: 0, length: 0, mark: "retracted" });
      }
    }
    for (const request of [...ended, ...retracted]) this.#leave(request);
    return { step: one.step, at: one.at_ms, cells, waiting: one.waiting, free: one.free, retracted: one.num_retracted };
  }

  /** Who has no row any more may have ended in what was not told. @param {any} step */
  #forget(step) {
    const there = new Set([...step.rows.map((/** @type {any} */ row) => row[0]), ...step.retracted]);
    for (const request of [...this.#lane.keys()]) if (!there.has(request)) this.#leave(request);
  }

  /** The lowest lane that is free. @param {number} request */
  #of(request) {
    let lane = this.#lane.get(request);
    if (lane === undefined) {
      lane = this.#taken.indexOf(false);
      if (lane < 0) lane = this.#taken.length;
      this.#taken[lane] = true;
      this.#lane.set(request, lane);
    }
    return lane;
  }

  /** @param {any} request */
  #leave(request) {
    const lane = this.#lane.get(request);
    if (lane !== undefined) this.#taken[lane] = false;
    this.#lane.delete(request);
  }
}

const RED = 36; // degrees to each side of it, which means a retraction and nothing else

/** The hue of a request, in degrees: neighbouring numbers lie far from each other, and none is red. @param {number} request */
export function hue(request) {
  const turned = ((Math.abs(request) % 2 ** 40) * 137.508) % 360;
  return Math.round(RED + (turned * (360 - 2 * RED)) / 360);
}
