// @ts-check
// The prefix cache's tree: its largest edges, who is below whom, who holds them, how long nobody did.

import { h } from "./dom.js";
import { number } from "./stream.js";

const SHOWN = 48;
const NOTHING = "Nothing is cached.";
const HEADS = ["Prefix", "Tokens", "From the start", "Held by", "Branches", "Idle"];

/** @typedef {{id: number, parent: number, tokens: number, depth: number, locks: number, age: number, children: number, pinned: boolean, saved: boolean, text?: string}} Node */

/**
 * Parents before their children, the largest first; with how deep each is indented.
 * @param {Node[]} nodes
 * @returns {[Node, number][]}
 */
export function ordered(nodes) {
  const known = new Set(nodes.map((one) => one.id));
  /** @type {Map<number, Node[]>} */
  const below = new Map();
  for (const one of nodes) {
    const parent = known.has(one.parent) ? one.parent : 0;
    const others = below.get(parent);
    if (others) others.push(one);
    else below.set(parent, [one]);
  }
  /** @type {[Node, number][]} */
  const found = [];
  /** @type {[Node, number][]} */
  const open = (below.get(0) ?? []).map((one) => /** @type {[Node, number]} */ ([one, 0])).reverse();
  for (let next = open.pop(); next; next = open.pop()) {
    found.push(next);
    const [node, level] = next;
    for (const one of [...(below.get(node.id) ?? [])].reverse()) open.push([one, level + 1]);
  }
  return found;
}

/** The largest, and all that they are below of. @param {Node[]} nodes */
export function largest(nodes) {
  const byId = new Map(nodes.map((one) => [one.id, one]));
  const found = new Set(nodes.slice(0, SHOWN));
  for (const one of [...found]) {
    for (let next = byId.get(one.parent); next && !found.has(next); next = byId.get(next.parent)) found.add(next);
  }
  return nodes.filter((one) => found.has(one));
}

export class Tree {
  #rows = h("tbody");
  #about = h("p", { class: "hint" }, NOTHING);

  constructor() {
    this.element = h("div", { class: "scrolls" }, this.#about, h("table", { class: "tree" }, h("thead", {}, h("tr", {}, HEADS.map((one) => h("th", { scope: "col" }, one)))), this.#rows));
  }

  /** @param {{num_nodes: number, num_tokens: number, nodes: Node[]} | null} tree null: not known yet */
  show(tree) {
    if (!tree) {
      this.#about.textContent = NOTHING;
      this.#rows.replaceChildren();
      return;
    }
    const most = Math.max(1, ...tree.nodes.map((one) => one.tokens));
    const shown = ordered(largest(tree.nodes));
    this.#about.textContent = `${number(tree.num_tokens)} tokens in ${number(tree.num_nodes)} pieces${tree.num_nodes > shown.length ? `; the ${shown.length} largest` : ""}.`;
    this.#rows.replaceChildren(...shown.map(([node, level]) => row(node, level, most)));
  }
}

/** @param {Node} node @param {number} level @param {number} most */
function row(node, level, most) {
  const bar = h("span", { class: `edge${node.locks ? " held" : ""}${node.pinned ? " pinned" : ""}${node.saved ? " saved" : ""}`, title: node.saved && "The state at its end is kept." });
  bar.style.width = `${Math.max(2, (160 * node.tokens) / most)}px`;
  const cell = h("td", {}, bar, node.text && h("span", { class: "edge-text" }, node.text));
  cell.style.paddingLeft = `${0.5 + Math.min(level, 12)}rem`;
  const held = node.locks ? `${node.locks}${node.pinned ? ", pinned" : ""}` : "nobody";
  return h("tr", {}, cell, [number(node.tokens), number(node.depth), held, number(node.children), node.locks ? "" : number(node.age)].map((text) => h("td", {}, text)));
}
