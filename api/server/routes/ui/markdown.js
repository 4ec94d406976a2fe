/**
 * Markdown as nodes, never as HTML, so that nothing in a text is run or loaded.
 *
 * The parser works on stretches of the text and lets `paint` make their nodes, so that the caller
 * knows the position of each word and can colour its tokens.
 */

import { copyButton, fill, make } from "./dom.js";

/** @typedef {[from: number, to: number]} Stretch the bounds of a line, or of a part of one */
/** @typedef {(from: number, to: number) => (Node | string)[]} Paint makes the nodes of a stretch */
/** @typedef {{node: ChildNode | null, end: number}} Block up to line `end`; null: an empty line */

const DEEPEST = 8; // Nesting of quotes, lists and emphasis.
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?: +|$)/;
const COLUMNS = /^ *\|?( *:?-+:? *\|)+( *:?-+:? *)?$/;
const SPECIAL = /[\\`*_~[h]/; // The first characters of entries of `INLINE`.
const OTHER = /[^`]/g;
const SAFE = /^(https?:\/\/|mailto:)/i;

/** @typedef {(parser: Parser, depth: number) => (Node | string)[]} NodesOf */
/** @typedef {[end: number, nodesOf: NodesOf]} Mark where it ends, and what makes its nodes */

/**
 * Marks on both sides of a text: their beginning and end, their width, and their element.
 * @type {[begin: RegExp, end: RegExp, width: number, name: "strong" | "del" | "em"][]}
 */
const PAIRS = [
  [/\*\*(?=\S)/y, /(?<=\S)\*\*/g, 2, "strong"],
  [/__(?=\S)/y, /(?<=\S)__/g, 2, "strong"],
  [/~~(?=\S)/y, /(?<=\S)~~/g, 2, "del"],
  [/\*(?=[^\s*])/y, /(?<=[^\s*])\*(?!\*)/g, 1, "em"],
  [/(?<!\w)_(?=[^\s_])/y, /(?<=[^\s_])_(?!\w)/g, 1, "em"],
];

/**
 * Other patterns inside a line, and functions that make the nodes of a match. The lengths of white
 * space and titles are bounded: without an end, each link would be searched up to the line's end.
 * @type {[RegExp, (parser: Parser, found: RegExpExecArray, depth: number) => (Node | string)[]][]}
 */
const INLINE = [
  [/\\([!-/:-@[-`{-~])/y, (parser, { index }) => parser.paint(index + 1, index + 2)],
  [/\[([^[\]]+)\]\(\s{0,9}([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)(?:\s{1,9}"[^"]{0,300}")?\s{0,9}\)/y,
    (parser, found, depth) => {
      const start = found.index + 1;
      return link(found[2], parser.inline([start, start + found[1].length], depth));
    }],
  [/https?:\/\/[^\s<>"'`*)\]]*[^\s<>"'`*)\].,:;!?]/y, (parser, { 0: url, index }) =>
    link(url, parser.paint(index, index + url.length))],
];

/**
 * The ends of marks in a stretch. Searches only go forward, so each pattern reads it only once.
 */
class Ends {
  /** @type {Map<RegExp, number>} */
  #next = new Map(); // Where each pattern matches next; infinite: nowhere.
  /** @type {Map<number, number[]> | null} */
  #runs = null; // Where runs of backticks begin, by their length; the last one comes first.
  #runEnd = 0; // The end of the latest run of backticks.

  /** @param {string} line the text up to the end of the stretch */
  constructor(line) {
    this.line = line;
  }

  /**
   * Return where a pattern matches at or after `from`.
   * @param {RegExp} pattern
   * @param {number} from
   */
  after(pattern, from) {
    let at = this.#next.get(pattern) ?? -1;
    if (at < from) {
      pattern.lastIndex = from;
      at = pattern.exec(this.line)?.index ?? Infinity;
      this.#next.set(pattern, at);
    }
    return at;
  }

  /**
   * Return the code in backticks that begins at `i`, or null.
   * @param {number} i
   * @returns {Mark | null}
   */
  code(i) {
    if (this.line[i] !== "`") return null;
    if (this.#runEnd <= i) this.#runEnd = Math.min(this.after(OTHER, i), this.line.length);
    const from = this.#runEnd, width = from - i;
    this.#runs ??= runsOf(this.line, i);
    const starts = this.#runs.get(width) ?? [];
    while (starts.length && starts[starts.length - 1] < from) starts.pop();
    const to = starts[starts.length - 1];
    if (to === undefined) return null;
    return [to + width, (parser) => [make("code", {}, parser.paint(from, to))]];
  }

  /**
   * Return the text between two equal marks that begins at `i`, or null.
   * @param {number} i
   * @returns {Mark | null}
   */
  pair(i) {
    for (const [begin, end, width, name] of PAIRS) {
      begin.lastIndex = i;
      if (!begin.test(this.line)) continue;
      const from = i + width, to = this.after(end, from + 1);
      if (to === Infinity) continue;
      return [to + width, (parser, depth) => [make(name, {}, parser.inline([from, to], depth))]];
    }
    return null;
  }
}

/**
 * Return where runs of backticks begin, by their length, in descending order.
 * @param {string} line
 * @param {number} from
 */
function runsOf(line, from) {
  /** @type {Map<number, number[]>} */
  const runs = new Map(), pattern = /`+/g;
  pattern.lastIndex = from;
  for (let found; (found = pattern.exec(line));) {
    const starts = runs.get(found[0].length);
    if (starts) starts.push(found.index);
    else runs.set(found[0].length, [found.index]);
  }
  for (const starts of runs.values()) starts.reverse();
  return runs;
}

/**
 * @param {string} address
 * @param {(Node | string)[]} inside
 */
function link(address, inside) {
  if (!SAFE.test(address)) return inside;
  const attributes = { href: address, target: "_blank", rel: "noopener noreferrer nofollow" };
  return [make("a", attributes, inside)];
}

/**
 * Make a block of code; return it and the element for its lines.
 * @param {string} language
 */
function codeBlock(language) {
  const code = make("code");
  const copy = copyButton(() => code.textContent);
  const header = make("header", {}, make("span", {}, language || "code"), copy);
  return { code, node: make("div", { class: "code" }, header, make("pre", { tabindex: 0 }, code)) };
}

/**
 * Return the lines of a text from `start` on.
 * @param {string} text
 * @param {number} start
 * @returns {Stretch[]}
 */
function linesOf(text, start = 0) {
  /** @type {Stretch[]} */
  const lines = [];
  for (let from = start; from <= text.length;) {
    const next = text.indexOf("\n", from);
    const to = next < 0 ? text.length : next;
    lines.push([from, to]);
    from = to + 1;
  }
  return lines;
}

/**
 * Return the pattern of the line that ends a block of code.
 * @param {RegExpExecArray} fence its first line
 */
const fenceEnd = (fence) => new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);

class Parser {
  /**
   * @param {string} text
   * @param {Paint} paint
   */
  constructor(text, paint) {
    this.text = text;
    this.paint = paint;
  }

  /** @param {Stretch} stretch */
  at([from, to]) {
    return this.text.slice(from, to);
  }

  /**
   * Return the nodes of lines.
   * @param {Stretch[]} lines
   * @param {number} depth
   */
  blocks(lines, depth) {
    /** @type {Node[]} */
    const nodes = [];
    for (let i = 0; i < lines.length;) {
      const { node, end } = this.block(lines, i, depth);
      if (node) nodes.push(node);
      i = end;
    }
    return nodes;
  }

  /**
   * Return the block that begins with line `i`. It depends neither on earlier lines nor on lines
   * after the one that follows its end; `GrowingMarkdown` relies on both.
   * @param {Stretch[]} lines
   * @param {number} i
   * @param {number} depth
   * @returns {Block}
   */
  block(lines, i, depth) {
    const line = this.at(lines[i]);
    if (!line.trim()) return { node: null, end: i + 1 };
    switch (kindOf(line, depth)) {
      case "fence": return this.#code(lines, i);
      case "heading": return { node: this.#heading(lines[i]), end: i + 1 };
      case "rule": return { node: make("hr"), end: i + 1 };
      case "quote": return this.#quote(lines, i, depth);
      case "item": return this.#list(lines, i, depth);
    }
    const next = i + 1 < lines.length ? this.at(lines[i + 1]) : "";
    const isTable = line.includes("|") && COLUMNS.test(next);
    return isTable ? this.#table(lines, i) : this.#paragraph(lines, i, depth);
  }

  /**
   * @param {Stretch[]} lines
   * @param {number} i
   * @returns {Block}
   */
  #code(lines, i) {
    const fence = /** @type {RegExpExecArray} */ (FENCE.exec(this.at(lines[i])));
    const isEnd = fenceEnd(fence), { code, node } = codeBlock(fence[2].trim());
    let end = i + 1;
    for (; end < lines.length && !isEnd.test(this.at(lines[end])); end += 1) {
      fill(code, [...(end > i + 1 ? ["\n"] : []), ...this.paint(...lines[end])]);
    }
    return { node, end: end + 1 };
  }

  /** @param {Stretch} line */
  #heading([from, to]) {
    const found = /** @type {RegExpExecArray} */ (HEADING.exec(this.at([from, to])));
    const name = /** @type {"h1"} */ (`h${found[1].length}`);
    return make(name, {}, this.inline([from + found[0].length, to]));
  }

  /**
   * @param {Stretch[]} lines
   * @param {number} i
   * @param {number} depth
   * @returns {Block}
   */
  #quote(lines, i, depth) {
    /** @type {Stretch[]} */
    const inside = [];
    let end = i;
    for (; end < lines.length; end += 1) {
      const [from, to] = lines[end], found = QUOTE.exec(this.at(lines[end]));
      if (!found) break;
      inside.push([from + found[0].length, to]);
    }
    return { node: make("blockquote", {}, this.blocks(inside, depth + 1)), end };
  }

  /**
   * @param {Stretch[]} lines
   * @param {number} i
   * @param {number} depth
   * @returns {Block}
   */
  #list(lines, i, depth) {
    const number = parseInt(this.at(lines[i]), 10), isOrdered = !isNaN(number), items = [];
    let end = i;
    while (end < lines.length && this.#isItem(lines[end], isOrdered)) {
      const item = this.#itemLines(lines, end);
      items.push(make("li", {}, this.blocks(item.lines, depth + 1)));
      end = item.end;
      while (this.#isEmpty(lines[end]) && lines[end + 1] && ITEM.test(this.at(lines[end + 1]))) {
        end += 1;
      }
    }
    const start = isOrdered ? number : undefined;
    return { node: make(isOrdered ? "ol" : "ul", { start }, ...items), end };
  }

  /**
   * @param {Stretch} line
   * @param {boolean} isOrdered
   */
  #isItem(line, isOrdered) {
    const text = this.at(line), found = ITEM.exec(text);
    return found !== null && /\d/.test(found[2]) === isOrdered && !RULE.test(text);
  }

  /** @param {Stretch | undefined} line */
  #isEmpty(line) {
    return line !== undefined && !this.at(line).trim();
  }

  /**
   * Return the lines of the item that begins with line `i`, without the item's mark and indent.
   * @param {Stretch[]} lines
   * @param {number} i
   */
  #itemLines(lines, i) {
    const mark = /** @type {RegExpExecArray} */ (ITEM.exec(this.at(lines[i])));
    const indent = Math.min(mark[0].length, mark[1].length + mark[2].length + 4);
    /** @type {Stretch[]} */
    const inside = [[lines[i][0] + mark[0].length, lines[i][1]]];
    let end = i + 1;
    for (; end < lines.length && !this.#endsItem(lines, end, inside[inside.length - 1]); end += 1) {
      const [from, to] = lines[end];
      inside.push([from + Math.min(leadOf(this.at(lines[end])), indent), to]);
    }
    while (inside.length > 1 && this.#isEmpty(inside[inside.length - 1])) inside.pop();
    return { lines: inside, end };
  }

  /**
   * Return whether line `i` is outside an item whose last line is `last`.
   * @param {Stretch[]} lines
   * @param {number} i
   * @param {Stretch} last
   */
  #endsItem(lines, i, last) {
    const line = this.at(lines[i]);
    if (!line.trim()) {
      const next = i + 1 < lines.length ? this.at(lines[i + 1]) : "";
      return !/^ {2,}\S/.test(next) && !ITEM.test(next);
    }
    if (leadOf(line) >= 2) return false;
    return this.#isEmpty(last) || ITEM.test(line) || FENCE.test(line) || HEADING.test(line);
  }

  /**
   * @param {Stretch[]} lines
   * @param {number} i
   * @returns {Block}
   */
  #table(lines, i) {
    const row = (/** @type {"th" | "td"} */ kind, /** @type {Stretch} */ line) => make("tr", {},
      ...this.#cells(line).map((cell) => make(kind, {}, ...this.inline(cell))));
    const head = row("th", lines[i]), body = [];
    let end = i + 2;
    for (; end < lines.length && this.at(lines[end]).includes("|"); end += 1) {
      body.push(row("td", lines[end]));
    }
    const table = make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
    return { node: make("div", { class: "wide" }, table), end };
  }

  /** @param {Stretch} line */
  #cells([from, to]) {
    /** @type {Stretch[]} */
    const cells = [];
    let start = from;
    for (let i = from; i <= to; i += 1) {
      if (i < to && (this.text[i] !== "|" || this.text[i - 1] === "\\")) continue;
      cells.push([start, i]);
      start = i + 1;
    }
    if (this.#isEmpty(cells[0])) cells.shift();
    if (this.#isEmpty(cells[cells.length - 1])) cells.pop();
    return cells.map((cell) => /** @type {Stretch} */ ([cell[0] + leadOf(this.at(cell)), cell[1]]));
  }

  /**
   * @param {Stretch[]} lines
   * @param {number} i
   * @param {number} depth
   * @returns {Block}
   */
  #paragraph(lines, i, depth) {
    const inside = this.inline(lines[i]);
    let end = i + 1;
    for (; end < lines.length; end += 1) {
      const line = this.at(lines[end]);
      if (!line.trim() || kindOf(line, depth)) break;
      inside.push(make("br"));
      for (const node of this.inline(lines[end])) inside.push(node);
    }
    return { node: make("p", {}, inside), end };
  }

  /**
   * Return the nodes of a stretch inside one line.
   * @param {Stretch} stretch
   * @param {number} depth
   */
  inline([from, to], depth = 0) {
    const nodes = [], ends = new Ends(this.text.slice(0, to));
    let plain = from;
    for (let i = from; i < to;) {
      const found = depth <= DEEPEST && SPECIAL.test(this.text[i]) ? markAt(ends, i) : null;
      if (!found) {
        i += 1;
        continue;
      }
      const [end, nodesOf] = found;
      for (const node of this.paint(plain, i)) nodes.push(node);
      for (const node of nodesOf(this, depth + 1)) nodes.push(node);
      plain = i = end;
    }
    return [...nodes, ...this.paint(plain, to)];
  }
}

/**
 * Return the kind of block that a line begins even directly after a paragraph.
 * @param {string} line
 * @param {number} depth
 */
function kindOf(line, depth) {
  if (FENCE.test(line)) return "fence";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (depth > DEEPEST) return "";
  if (QUOTE.test(line)) return "quote";
  return ITEM.test(line) ? "item" : "";
}

/** Return the number of spaces at the beginning. @param {string} line */
const leadOf = (line) => line.length - line.replace(/^ +/, "").length;

/**
 * Return the mark that begins at `i`, or null.
 * @param {Ends} ends
 * @param {number} i
 * @returns {Mark | null}
 */
function markAt(ends, i) {
  const mark = ends.code(i) ?? ends.pair(i);
  if (mark) return mark;
  for (const [pattern, nodesOf] of INLINE) {
    pattern.lastIndex = i;
    const found = pattern.exec(ends.line);
    if (found) return [i + found[0].length, (parser, depth) => nodesOf(parser, found, depth)];
  }
  return null;
}

/**
 * Return the nodes of a whole text.
 * @param {string} text
 * @param {Paint} paint
 */
export const markdown = (text, paint) => new Parser(text, paint).blocks(linesOf(text), 0);

/** @typedef {{isEnd: RegExp, code: Element, hasLines: boolean}} OpenFence an open block of code */

/**
 * Markdown that grows. A block that no further text can change is parsed once, and its node stays.
 * The same is true for each complete line of a block of code that has not ended yet.
 */
export class GrowingMarkdown {
  #closed = 0; // The nodes of the text before this stay.
  /** @type {ChildNode[]} */
  #open = []; // The nodes of the text after it.
  /** @type {OpenFence | null} */
  #fence = null; // The block of code in which the closed text ends.

  /** @param {Element} box */
  constructor(box) {
    this.box = box;
  }

  /** Forget the text, so that the next one is parsed from its beginning. */
  clear() {
    this.box.replaceChildren();
    this.#closed = 0;
    this.#open = [];
    this.#fence = null;
  }

  /**
   * Show a text that continues the one shown before.
   * @param {string} text
   * @param {Paint} paint
   */
  update(text, paint) {
    for (const node of this.#open) node.remove();
    this.#open = [];
    const parser = new Parser(text, paint), lines = linesOf(text, this.#closed);
    for (let i = 0; i < lines.length;) {
      i = this.#fence ? this.#addCode(this.#fence, parser, lines, i) : this.#add(parser, lines, i);
    }
  }

  /**
   * Add the block that begins with line `i`; return the index of the line after it.
   * @param {Parser} parser
   * @param {Stretch[]} lines
   * @param {number} i
   */
  #add(parser, lines, i) {
    const last = lines.length - 1; // This line may continue.
    const areClosed = this.#open.length === 0; // Whether all earlier blocks are closed.
    const fence = i < last && areClosed ? FENCE.exec(parser.at(lines[i])) : null;
    if (fence) {
      const { code, node } = codeBlock(fence[2].trim());
      this.box.append(node);
      this.#fence = { isEnd: fenceEnd(fence), code, hasLines: false };
      this.#closed = lines[i + 1][0];
      return i + 1;
    }
    const { node, end } = parser.block(lines, i, 0);
    if (node) this.box.append(node);
    if (areClosed && end + 1 < last) this.#closed = lines[end][0];
    else if (node) this.#open.push(node);
    return end;
  }

  /**
   * Add a line to a block of code, or end the block; return the index of the next line.
   * @param {OpenFence} fence
   * @param {Parser} parser
   * @param {Stretch[]} lines
   * @param {number} i
   */
  #addCode(fence, parser, lines, i) {
    const isLast = i === lines.length - 1; // It may continue and then not end the block.
    const isEnd = fence.isEnd.test(parser.at(lines[i]));
    if (!isEnd) {
      const nodes = [...(fence.hasLines ? ["\n"] : []), ...parser.paint(...lines[i])].map(nodeOf);
      fill(fence.code, nodes);
      if (isLast) this.#open.push(...nodes);
      else fence.hasLines = true;
    } else if (!isLast) this.#fence = null;
    if (!isLast) this.#closed = lines[i + 1][0];
    return i + 1;
  }
}

/**
 * @param {Node | string} child
 * @returns {ChildNode}
 */
function nodeOf(child) {
  const node = typeof child === "string" ? document.createTextNode(child) : child;
  return /** @type {ChildNode} */ (node);
}
