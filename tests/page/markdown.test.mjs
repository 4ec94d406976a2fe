/** Markdown as nodes, whole and while it grows. */

import assert from "node:assert/strict";
import { test } from "node:test";

import "./dom.mjs";
import { GrowingMarkdown, markdown } from "../../api/server/routes/ui/markdown.js";

const LINK = 'target="_blank" rel="noopener noreferrer nofollow"';
const plain = (text) => (from, to) => from < to ? [text.slice(from, to)] : [];
const html = (text) => markdown(text, plain(text)).map((each) => each.outerHTML).join("");
const code = (language, text) => `<div class="code"><header><span>${language}</span>` +
  `<button type="button">Copy</button></header><pre tabindex="0"><code>${text}</code></pre></div>`;
const table = (...rows) => `<div class="wide"><table>${rows.join("")}</table></div>`;

/** Name, text, nodes. */
const CASES = [
  ["nothing", "", ""],
  ["empty lines", "\n \n", ""],
  ["a paragraph", "one", "<p>one</p>"],
  ["lines of a paragraph", "one\ntwo", "<p>one<br></br>two</p>"],
  ["paragraphs", "one\n\ntwo", "<p>one</p><p>two</p>"],
  ["HTML stays text", "<img src=x onerror=f()>", "<p>&lt;img src=x onerror=f()></p>"],
  ["a heading", "# Head", "<h1>Head</h1>"],
  ["the last heading", "###### six", "<h6>six</h6>"],
  ["no heading of seven", "####### seven", "<p>####### seven</p>"],
  ["no heading without a space", "#tag", "<p>#tag</p>"],
  ["a heading ends a paragraph", "one\n## two", "<p>one</p><h2>two</h2>"],
  ["a rule", "---", "<hr></hr>"],
  ["a rule with spaces", "* * *", "<hr></hr>"],
  ["no rule of two", "--", "<p>--</p>"],
  ["strong", "a **b c** d", "<p>a <strong>b c</strong> d</p>"],
  ["strong by underscores", "__b__", "<p><strong>b</strong></p>"],
  ["emphasis", "*b* _c_", "<p><em>b</em> <em>c</em></p>"],
  ["emphasis in strong", "**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"],
  ["stars of a product", "2 * 3 * 4", "<p>2 * 3 * 4</p>"],
  ["underscores of a name", "snake_case_name", "<p>snake_case_name</p>"],
  ["a mark without its end", "**open", "<p>**open</p>"],
  ["struck out", "~~a~~", "<p><del>a</del></p>"],
  ["code in a line", "`a*b*c`", "<p><code>a*b*c</code></p>"],
  ["code with a backtick", "``a`b``", "<p><code>a`b</code></p>"],
  ["an escaped mark", "\\*a\\*", "<p>*a*</p>"],
  ["a backslash before a letter", "\\n", "<p>\\n</p>"],
  ["a link", "[a](https://b.c/d)", `<p><a href="https://b.c/d" ${LINK}>a</a></p>`],
  ["a link with brackets", "[a](https://b.c/d_(e))",
    `<p><a href="https://b.c/d_(e)" ${LINK}>a</a></p>`],
  ["a link with a title", '[a](https://b.c "t")', `<p><a href="https://b.c" ${LINK}>a</a></p>`],
  ["a link by mail", "[a](mailto:b@c.d)", `<p><a href="mailto:b@c.d" ${LINK}>a</a></p>`],
  ["a link that would run", "[a](javascript:f())", "<p>a</p>"],
  ["a link to data", "[a](data:text/html,x)", "<p>a</p>"],
  ["a bare address and its full stop", "See https://b.c/d.",
    `<p>See <a href="https://b.c/d" ${LINK}>https://b.c/d</a>.</p>`],
  ["an image is not loaded", "![a](https://b.c/d.png)",
    `<p>!<a href="https://b.c/d.png" ${LINK}>a</a></p>`],
  ["a block of code", "```js\na *b*\n\nc\n```", code("js", "a *b*\n\nc")],
  ["code by tildes", "~~~\n```\n~~~", code("code", "```")],
  ["a longer fence", "````\n```\n````", code("code", "```")],
  ["code without its end", "```\na", code("code", "a")],
  ["code is indented as it is", "```\n  a\n```", code("code", "  a")],
  ["text behind code", "```\na\n```\nb", `${code("code", "a")}<p>b</p>`],
  ["code ends a paragraph", "a\n```\nb\n```", `<p>a</p>${code("code", "b")}`],
  ["a list", "- a\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"],
  ["stars and pluses", "* a\n+ b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"],
  ["an ordered list", "3. a\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'],
  ["lists of two kinds", "- a\n1. b",
    '<ul><li><p>a</p></li></ul><ol start="1"><li><p>b</p></li></ol>'],
  ["a list in a list", "- a\n  1. b",
    '<ul><li><p>a</p><ol start="1"><li><p>b</p></li></ol></li></ul>'],
  ["a list with empty lines", "- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"],
  ["a paragraph in an item", "- a\n\n  b", "<ul><li><p>a</p><p>b</p></li></ul>"],
  ["code in an item", "- a\n  ```\n  b\n  ```", `<ul><li><p>a</p>${code("code", "b")}</li></ul>`],
  ["text behind a list", "- a\n\nb", "<ul><li><p>a</p></li></ul><p>b</p>"],
  ["an item that is empty", "-\n- b", "<ul><li></li><li><p>b</p></li></ul>"],
  ["a quote", "> a\n> b", "<blockquote><p>a<br></br>b</p></blockquote>"],
  ["a quote in a quote", "> > a", "<blockquote><blockquote><p>a</p></blockquote></blockquote>"],
  ["a list in a quote", "> - a", "<blockquote><ul><li><p>a</p></li></ul></blockquote>"],
  ["a table", "| a | b |\n|---|:-:|\n| 1 | *2* |", table(
    "<thead><tr><th>a </th><th>b </th></tr></thead>",
    "<tbody><tr><td>1 </td><td><em>2</em> </td></tr></tbody>")],
  ["a table without outer bars", "a | b\n--|--\n1 | 2", table(
    "<thead><tr><th>a </th><th>b</th></tr></thead>",
    "<tbody><tr><td>1 </td><td>2</td></tr></tbody>")],
  ["a bar in a cell", "| a\\|b |\n|---|", table("<thead><tr><th>a|b </th></tr></thead>",
    "<tbody></tbody>")],
  ["a bar is no table", "a | b", "<p>a | b</p>"],
];

for (const [name, text, expected] of CASES) {
  test(`Markdown: ${name}`, () => assert.equal(html(text), expected));
}

test("quotes in each other end", () => {
  assert.match(html(`${">".repeat(500)} a`), /^(<blockquote>){9}<p>>+ a<\/p>/);
});

/** Texts of marks and of whole blocks, always the same ones. */
function* texts(rounds) {
  const marks = [..."xz*_`~#>-+|[]!\\\n\n  1.", "```\n", "\n- ", "\n\n", "|-|\n", "\n# "];
  let state = 7;
  const next = (below) => (state = state * 48271 % 2147483647) % below;
  for (let round = 0; round < rounds; round += 1) {
    yield Array.from({ length: 1 + next(60) }, () => marks[next(marks.length)]).join("");
  }
}

test("a text that grows is shown as the whole text is", () => {
  for (const text of texts(200)) {
    const box = document.createElement("div"), growing = new GrowingMarkdown(box);
    for (let end = 0; end <= text.length; end += 1 + end % 3) {
      const part = text.slice(0, end);
      growing.update(part, plain(part));
      assert.equal(box.innerHTML, html(part), JSON.stringify(part));
    }
  }
});

test("a line may have more marks than a call takes arguments", () => {
  const box = document.createElement("div"), text = "# " + "`a` ".repeat(70_000);
  new GrowingMarkdown(box).update(text, plain(text));
  assert.equal(box.innerHTML.match(/<code>/g)?.length, 70_000);
});

/** Marks without an end: searching for each one up to the end of the line would take hours. */
const OPEN = ["**a ", "__a ", "*a ", " _a ", "~~a ", "`a ``b ", '[a](b "', "[a](  b"];

for (const mark of [...OPEN, "`", "*", "_", "[a](   "]) {
  test(`each character of a long line of ${JSON.stringify(mark)} is read a few times`, () => {
    const text = `x${mark.repeat(1e6 / mark.length)}`;
    const [paragraph] = markdown(text, plain(text));
    assert.ok(paragraph.textContent.length >= text.length / 6);
  });
}

test("a text is shown anew after it was cleared", () => {
  const box = document.createElement("div"), growing = new GrowingMarkdown(box);
  growing.update("a\n\nb\n\n```\nc", plain("a\n\nb\n\n```\nc"));
  growing.clear();
  growing.update("d", plain("d"));
  assert.equal(box.innerHTML, "<p>d</p>");
});

const PARAGRAPH = "Some words, and *more* of them.\n\n", LINE = "value = value + 1\n";
const LONG = { "paragraphs": PARAGRAPH.repeat(300), "one block of code": "```\n" + LINE.repeat(600) };

for (const [name, text] of Object.entries(LONG)) {
  test(`while ${name} grow, each character is parsed a few times and nodes stay`, () => {
    const box = document.createElement("div"), growing = new GrowingMarkdown(box);
    let numPainted = 0;
    const paint = (from, to) => {
      numPainted += to - from;
      return plain(text)(from, to);
    };
    const step = 20, nodes = [];
    for (let end = 0; end < text.length; end += step) {
      growing.update(text.slice(0, end), (from, to) => paint(from, Math.min(to, end)));
      nodes.push(box.children[0]);
    }
    assert.equal(new Set(nodes.slice(-nodes.length + 10)).size, 1, "the first block stays");
    assert.ok(numPainted < 5 * text.length, `${numPainted} of ${text.length} characters`);
  });
}
