// @ts-check
// Conversations, kept in this browser (localStorage), one entry each; nothing of them is on the server.

/** @typedef {{content: string, logprob: number, top: {token: string, logprob: number}[], bytes?: number[] | null}} Token */
/**
 * @typedef {object} Answer
 * @property {string} text
 * @property {string} reasoning
 * @property {{id: string, name: string, arguments: string}[]} calls
 * @property {Token[]} [tokens] not kept
 * @property {any} [usage]
 * @property {number} [first] milliseconds to the first token
 * @property {number} [last] milliseconds to the last one
 * @property {string} [finish]
 * @property {string} [error]
 */
/** @typedef {{role: string, text: string, pictures?: import("./pictures.js").Picture[], toolCallId?: string, answers?: Answer[], chosen?: number}} Message */
/** @typedef {Record<string, any>} Settings */
/**
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {number} changed
 * @property {Settings} settings
 * @property {Message[]} messages
 */

const PREFIX = "minisgl.conversation.";
const LAST = "minisgl.settings";

/** @type {Settings} what is sent only if it was set is "" here */
export const DEFAULTS = {
  system: "", temperature: "", top_p: "", max_tokens: "", seed: "", presence_penalty: "", frequency_penalty: "",
  logprobs: false, extra: "", compare: false,
  b: { temperature: "", top_p: "", max_tokens: "", presence_penalty: "", frequency_penalty: "" },
};

/** @returns {Conversation} with the settings of the last one */
export function fresh() {
  const settings = { ...structuredClone(DEFAULTS), ...parsed(localStorage.getItem(LAST)) };
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", changed: Date.now(), settings, messages: [] };
}

/** @returns {Conversation[]} the latest first */
export function all() {
  const found = [];
  for (let i = 0; i < localStorage.length; i++) {
    const name = /** @type {string} */ (localStorage.key(i));
    const one = name.startsWith(PREFIX) && parsed(localStorage.getItem(name));
    if (one && Array.isArray(one.messages)) found.push({ ...one, settings: { ...structuredClone(DEFAULTS), ...one.settings } });
  }
  return found.sort((a, b) => b.changed - a.changed);
}

/**
 * When the browser has no more room, the oldest others go.
 * @param {Conversation} conversation
 * @returns {number} how many went
 */
export function keep(conversation) {
  conversation.changed = Date.now();
  const text = JSON.stringify(conversation, (name, value) => (name === "tokens" ? undefined : value));
  for (let gone = 0; ; gone++) {
    try {
      localStorage.setItem(PREFIX + conversation.id, text);
      localStorage.setItem(LAST, JSON.stringify(conversation.settings));
      return gone;
    } catch {
      const oldest = all().filter((one) => one.id !== conversation.id).pop();
      if (!oldest) return gone;
      remove(oldest.id);
    }
  }
}

/** @param {string} id */
export function has(id) {
  return localStorage.getItem(PREFIX + id) !== null;
}

/** @param {string} id */
export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}

/** @param {string | null} text */
function parsed(text) {
  try {
    return text ? JSON.parse(text) : null;
  } catch {
    return null;
  }
}
