// @ts-check
// Pictures of messages: read, made small, and kept in this browser's IndexedDB, as localStorage has no room for them.

import { h, notice } from "./dom.js";

/** @typedef {{id: string, name: string}} Picture what a message has of one */
/** @typedef {import("./store.js").Conversation} Conversation */

const MAX_SIDE_PX = 2048;
const MAX_CHARS = 3_000_000; // of a data URL
const AS_THEY_ARE = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const STORE = "pictures";

/** Data URLs by id, of this page. @type {Map<string, string>} */
const urls = new Map();
/** @type {Set<string>} */
const kept = new Set();
/** @type {Promise<IDBDatabase> | undefined} */
let opened;

/** Throws if the browser cannot read it as a picture. @param {File} file @returns {Promise<Picture>} */
export async function read(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE_PX / Math.max(bitmap.width, bitmap.height));
  const whole = scale === 1 && AS_THEY_ARE.includes(file.type) ? await dataUrl(file) : "";
  const id = crypto.getRandomValues(new Uint32Array(4)).join("-");
  urls.set(id, whole && whole.length <= MAX_CHARS ? whole : drawn(bitmap, scale, file.type));
  bitmap.close();
  return { id, name: file.name };
}

/** @param {File} file @returns {Promise<string>} */
function dataUrl(file) {
  const reader = new FileReader();
  reader.readAsDataURL(file);
  return new Promise((resolve, reject) => {
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error);
  });
}

/** What is no photo stays exact if that is small enough. @param {ImageBitmap} bitmap @param {number} scale @param {string} type */
function drawn(bitmap, scale, type) {
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = h("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  const exact = type === "image/jpeg" ? "" : canvas.toDataURL("image/png");
  if (exact && exact.length <= MAX_CHARS) return exact;
  Object.assign(context, { globalCompositeOperation: "destination-over", fillStyle: "#fff" }); // JPEG has no transparency
  context.fillRect(0, 0, width, height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

/** Those that this browser still has, as parts of a message. @param {Picture[] | undefined} pictures */
export function parts(pictures) {
  const found = (pictures ?? []).map((one) => urls.get(one.id)).filter((url) => url !== undefined);
  return found.map((url) => ({ type: "image_url", image_url: { url } }));
}

/** @param {Picture} picture @returns {HTMLElement} */
export function view(picture) {
  const url = urls.get(picture.id);
  if (!url) return h("span", { class: "hint" }, `${picture.name}: this browser no longer has it`);
  return h("img", { src: url, alt: picture.name, title: picture.name });
}

/** @param {Conversation} conversation @returns {string[]} */
function idsOf(conversation) {
  return conversation.messages.flatMap((one) => one.pictures ?? []).map((one) => one.id);
}

/** Store those of a conversation that is stored already. @param {Conversation} conversation */
export async function keep(conversation) {
  for (const id of idsOf(conversation)) {
    if (kept.has(id) || !urls.has(id)) continue;
    kept.add(id);
    await run("readwrite", (store) => store.put(urls.get(id), id)).catch(() =>
      notice("This browser cannot keep the picture: it goes when the page is left."));
  }
}

/** Read those of a conversation. @param {Conversation} conversation @returns {Promise<boolean>} whether some were read */
export async function load(conversation) {
  const wanted = idsOf(conversation).filter((id) => !urls.has(id));
  for (const id of wanted) {
    const url = await run("readonly", (store) => store.get(id)).catch(() => undefined);
    if (url) urls.set(id, url);
    kept.add(id);
  }
  return wanted.length > 0;
}

/** Delete those that no conversation has. `all` is called when their ids are known: another tab stores a conversation
 * before its pictures. @param {() => Conversation[]} all */
export async function sweep(all) {
  const ids = await run("readonly", (store) => store.getAllKeys()).catch(() => []);
  const used = new Set(all().flatMap(idsOf));
  for (const id of ids) {
    if (!used.has(String(id))) await run("readwrite", (store) => store.delete(id)).catch(() => {});
  }
}

/** A request to the store, and its result. @template T @param {IDBTransactionMode} mode @param {(store: IDBObjectStore) => IDBRequest<T>} work @returns {Promise<T>} */
export async function run(mode, work) {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open("minisgl", 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(STORE);
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  const transaction = (await opened).transaction(STORE, mode);
  const asked = work(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onabort = () => reject(transaction.error);
  });
}
