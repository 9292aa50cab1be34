// @ts-check
// The body of a chat request out of a conversation, and the same request for curl and Python.

import { ROOT } from "./api.js";
import { parts } from "./pictures.js";

/** @typedef {import("./store.js").Conversation} Conversation */
/** @typedef {import("./store.js").Settings} Settings */

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty"];
const MAX_ARGUMENT = 100_000; // Linux: 128 KiB
const COMPARED = NUMBERS.filter((name) => name !== "seed");

/**
 * @param {Conversation} conversation
 * @param {string} model
 * @param {number} which 0, or 1 for the second set of a comparison
 * @returns {any} Throws `SyntaxError` if the further fields are no JSON.
 */
export function body(conversation, model, which = 0) {
  const { settings } = conversation;
  /** @type {any[]} */
  const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const one of conversation.messages) {
    if (one.role === "user") messages.push({ role: "user", content: content(one) });
    else if (one.role === "tool") messages.push({ role: "tool", tool_call_id: one.toolCallId, content: one.text });
    else messages.push(assistant(one));
  }
  /** @type {any} */
  const found = { model, messages };
  for (const name of NUMBERS) {
    const value = which && COMPARED.includes(name) ? settings.b[name] : settings[name];
    if (value !== "" && value !== undefined) found[name] = Number(value);
  }
  if (settings.logprobs) Object.assign(found, { logprobs: true, top_logprobs: 5 });
  if (settings.extra.trim()) Object.assign(found, JSON.parse(settings.extra));
  return { ...found, stream: true, stream_options: { include_usage: true } };
}

/** @param {import("./store.js").Message} message */
function content({ text, pictures }) {
  const seen = parts(pictures);
  return seen.length ? [...seen, ...(text ? [{ type: "text", text }] : [])] : text;
}

/** The calls that an answer came to make; one that was cut off made none. @param {import("./store.js").Message} message */
export function called(message) {
  const answer = message.answers?.[message.chosen ?? 0];
  return answer?.finish === "tool_calls" ? answer.calls : [];
}

/** @param {import("./store.js").Message} message */
function assistant(message) {
  const answer = message.answers?.[message.chosen ?? 0];
  const calls = called(message);
  /** @type {any} */
  const found = { role: "assistant", content: answer?.text ?? "" };
  if (calls.length) {
    found.tool_calls = calls.map(({ id, name, arguments: text }) => ({
      id, type: "function", function: { name, arguments: text },
    }));
  }
  return found;
}

/** A shell takes no argument as long as a picture. @param {any} sent @param {boolean} withKey */
export function asCurl(sent, withKey) {
  const text = JSON.stringify(sent, null, 2);
  const data = text.length > MAX_ARGUMENT ? `@- <<'EOF'\n${text}\nEOF` : `'${text.replaceAll("'", `'\\''`)}'`;
  const key = withKey ? ` \\\n  -H "Authorization: Bearer $MINISGL_API_KEY"` : "";
  return `curl -N ${new URL("v1/chat/completions", ROOT)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${data}\n`;
}

/** With OpenAI's client; what that does not know goes in `extra_body`. @param {any} sent @param {boolean} withKey */
export function asPython(sent, withKey) {
  const known = ["model", "messages", "stream", "stream_options", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format", "stop", "n", ...NUMBERS];
  const own = Object.entries(sent).filter(([name]) => known.includes(name));
  const extra = Object.fromEntries(Object.entries(sent).filter(([name]) => !known.includes(name)));
  const lines = own.map(([name, value]) => `    ${name}=${literal(value)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra)},`);
  return [
    ...(withKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(String(new URL("v1", ROOT)))}, api_key=${withKey ? 'os.environ["MINISGL_API_KEY"]' : '"none"'})`,
    "stream = client.chat.completions.create(",
    ...lines,
    ")",
    "for chunk in stream:",
    "    for choice in chunk.choices:",
    '        print(choice.delta.content or "", end="", flush=True)',
    "",
  ].join("\n");
}

/** A Python literal. @param {any} value @returns {string} */
export function literal(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, one]) => `${literal(name)}: ${literal(one)}`).join(", ")}}`;
  }
  return JSON.stringify(value); // text and numbers are written alike
}
