// @ts-check
// `/stats/stream`, read for as long as somebody looks; begun again when it is lost. docs/metrics.md#the-live-stream.

import { ApiError, request } from "./api.js";
import { read } from "./sse.js";

const AGAIN_MS = 1000;

/**
 * @typedef {object} Listener
 * @property {(event: string, data: any) => void} took
 * @property {(text: string) => void} state what is wrong; empty: nothing
 */

export class Stream {
  /** @type {AbortController | null} */
  #running = null;

  /** @param {string} path @param {Listener} listener */
  constructor(path, listener) {
    this.path = path;
    this.listener = listener;
  }

  start() {
    this.stop();
    this.#running = new AbortController();
    this.#follow(this.#running.signal);
  }

  stop() {
    this.#running?.abort();
    this.#running = null;
  }

  /** @param {AbortSignal} signal */
  async #follow(signal) {
    while (!signal.aborted) {
      try {
        const response = await request(this.path, { signal });
        this.listener.state("");
        for await (const events of read(response)) {
          if (signal.aborted) return;
          for (const { event, data } of events) {
            const found = JSON.parse(data);
            if (event === "error") throw new ApiError(found.error.message, 500);
            this.listener.took(event, found);
          }
        }
        this.listener.state("The connection to the server was lost.");
      } catch (error) {
        if (signal.aborted) return;
        this.listener.state(error instanceof ApiError ? error.message : "The server cannot be reached.");
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }
}

/** @param {number | null | undefined} value @param {number} [digits] */
export function number(value, digits = 0) {
  if (value === null || value === undefined) return "\u2013";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Seconds in words. @param {number | null | undefined} value */
export function time(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 2 : 0)} ms`;
  return `${value.toFixed(2)} s`;
}
