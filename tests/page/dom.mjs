/** As much of a document as the page's modules need, for tests in Node. */

class Text {
  parent = null;

  constructor(text) {
    this.textContent = text;
  }

  get outerHTML() {
    return this.textContent.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  }

  remove() {
    this.parent?.children.splice(this.parent.children.indexOf(this), 1);
    this.parent = null;
  }
}

class Element extends Text {
  children = [];
  attributes = new Map();

  constructor(name) {
    super("");
    this.name = name;
    delete this.textContent; // that of the children is
  }

  get textContent() {
    return this.children.map((each) => each.textContent).join("");
  }

  set textContent(text) {
    this.replaceChildren(...(text ? [text] : []));
  }

  get outerHTML() {
    const attributes = [...this.attributes].map(([key, value]) => ` ${key}="${value}"`).join("");
    return `<${this.name}${attributes}>${this.innerHTML}</${this.name}>`;
  }

  get innerHTML() {
    return this.children.map((each) => each.outerHTML).join("");
  }

  setAttribute(key, value) {
    this.attributes.set(key, value);
  }

  addEventListener() {}

  append(...nodes) {
    for (const each of nodes) {
      const node = typeof each === "string" ? new Text(each) : each;
      node.parent = this;
      this.children.push(node);
    }
  }

  replaceChildren(...nodes) {
    this.children = [];
    this.append(...nodes);
  }
}

globalThis.document = {
  createElement: (name) => new Element(name),
  createElementNS: (_, name) => new Element(name),
  createTextNode: (text) => new Text(text),
};
