// @ts-check
// One answer, as it comes.

import { request } from "./api.js";
import { read } from "./sse.js";

/** @typedef {import("./store.js").Answer} Answer */

/** @returns {Answer} */
export function empty() {
  return { text: "", reasoning: "", calls: [] };
}

/**
 * Fills `answer` until its end; whatever goes wrong is in it, too, behind what came before.
 * @param {any} body
 * @param {Answer} answer
 * @param {AbortSignal} signal
 * @param {() => void} changed
 */
export async function generate(body, answer, signal, changed) {
  const began = performance.now();
  let ended = false;
  try {
    const response = await request("v1/chat/completions", { body, signal });
    for await (const events of read(response)) {
      for (const { data } of events) {
        if (data === "[DONE]") ended = true;
        else take(answer, JSON.parse(data), performance.now() - began);
      }
      changed();
    }
    if (!ended && !answer.error) answer.error = "The connection was lost before the end of the answer.";
  } catch (error) {
    if (signal.aborted) answer.finish = "stopped";
    else if (error instanceof TypeError) answer.error = "The server cannot be reached, or the connection was lost.";
    else answer.error = error instanceof Error ? error.message : String(error);
  }
  changed();
}

/** @param {Answer} answer @param {any} chunk @param {number} now */
function take(answer, chunk, now) {
  if (chunk.error) {
    answer.error = String(chunk.error.message ?? "The server ended the answer with an error.");
    return;
  }
  if (chunk.usage) answer.usage = chunk.usage;
  for (const choice of chunk.choices ?? []) {
    const delta = choice.delta ?? {};
    const thought = delta.reasoning_content ?? "";
    const text = delta.content ?? "";
    if (thought || text || delta.tool_calls || choice.logprobs?.content?.length) {
      answer.first ??= now;
      answer.last = now;
    }
    answer.reasoning += thought;
    answer.text += text;
    for (const call of delta.tool_calls ?? []) takeCall(answer, call);
    for (const one of choice.logprobs?.content ?? []) {
      (answer.tokens ??= []).push({ content: one.token, logprob: one.logprob, top: one.top_logprobs ?? [], bytes: one.bytes });
    }
    if (choice.finish_reason) answer.finish = choice.finish_reason;
  }
}

/** Its name comes first, its arguments piece by piece. @param {Answer} answer @param {any} call */
function takeCall(answer, call) {
  const place = (answer.calls[call.index ?? answer.calls.length] ??= { id: "", name: "", arguments: "" });
  if (call.id) place.id = call.id;
  place.name += call.function?.name ?? "";
  place.arguments += call.function?.arguments ?? "";
}

/** A line on how long it took. @param {Answer} answer @returns {string[]} */
export function figures(answer) {
  const found = [];
  if (answer.first !== undefined) found.push(`first token ${seconds(answer.first)}`);
  const count = answer.usage?.completion_tokens;
  if (count && answer.last && answer.first !== undefined) {
    const all = answer.last > answer.first; // else all of it came at once
    found.push(`${(((all ? count - 1 : count) * 1000) / (all ? answer.last - answer.first : answer.last)).toFixed(1)} tokens/s`);
  }
  if (answer.usage) {
    const { prompt_tokens: prompt, prompt_tokens_details: details } = answer.usage;
    const seen = details?.image_tokens ? ` (${details.image_tokens} of pictures)` : "";
    found.push(`${count} tokens`, `prompt ${prompt}${seen}, ${details?.cached_tokens ?? 0} cached`);
  }
  if (answer.finish && answer.finish !== "stop") found.push(answer.finish === "length" ? "ended by its length" : answer.finish);
  return found;
}

/** @param {number} ms */
function seconds(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
}
