// @ts-check
// Server-sent events out of a response that is being read. `fetch`, not EventSource: that cannot send the key.

/** @typedef {{event: string, data: string}} Sent */

/**
 * Takes pieces of text, cut anywhere, and gives whole events.
 */
export class Events {
  #left = "";

  /** @param {string} piece @returns {Sent[]} */
  take(piece) {
    const blocks = (this.#left + piece.replaceAll("\r", "")).split("\n\n");
    this.#left = /** @type {string} */ (blocks.pop());
    const found = [];
    for (const block of blocks) {
      let event = "message";
      const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line.startsWith("event:")) event = line.slice(6).trim();
      }
      if (data.length) found.push({ event, data: data.join("\n") });
    }
    return found;
  }
}

/**
 * @param {Response} response
 * @returns {AsyncGenerator<Sent[]>} what came with one read
 */
export async function* read(response) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  const events = new Events();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const found = events.take(decoder.decode(value, { stream: true }));
      if (found.length) yield found;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
