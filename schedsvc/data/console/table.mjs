// Tables that are filled once a second. Rows keep their elements, so a selection, the focus and the
// place of a screen reader survive. Text goes in by textContent, because names come from outside.

/** A table. A column is {title, cell(row), number, text, sort(row)}; the first one names rows. */
export class Table {
  constructor(element, columns, keyOf, sortBy = null) {
    this.columns = columns;
    this.keyOf = keyOf;
    this.sortBy = sortBy;
    this.descending = true;
    this.rows = new Map();
    this.last = [];
    this.heads = columns.map((column) => this.head(column));
    const head = document.createElement('thead');
    head.append(document.createElement('tr'));
    // Cards on a narrow screen are no table to a browser: roles keep it one for a screen reader.
    element.classList.add('cards');
    element.setAttribute('role', 'table');
    for (const part of [head, this.body = document.createElement('tbody')]) {
      part.setAttribute('role', 'rowgroup');
    }
    head.firstChild.setAttribute('role', 'row');
    head.firstChild.append(...this.heads);
    element.append(head, this.body);
    this.element = element;
    this.markSort();
  }

  head(column) {
    const made = document.createElement('th');
    made.scope = 'col';
    made.setAttribute('role', 'columnheader');
    if (column.number) made.className = 'number';
    if (!column.sort) {
      made.textContent = column.title;
      return made;
    }
    const button = document.createElement('button');
    button.type = 'button';
    button.textContent = column.title;
    button.addEventListener('click', () => {
      this.descending = this.sortBy === column.title ? !this.descending : true;
      this.sortBy = column.title;
      this.markSort();
      this.fill(this.last);
    });
    made.append(button);
    return made;
  }

  markSort() {
    for (const [i, column] of this.columns.entries()) {
      const order = this.descending ? 'descending' : 'ascending';
      if (column.title === this.sortBy) this.heads[i].setAttribute('aria-sort', order);
      else this.heads[i].removeAttribute('aria-sort');
    }
  }

  /** Show these rows, sorted as the reader chose. A row with `last` stays at the end. */
  fill(rows) {
    this.last = rows;
    const by = this.columns.find((column) => column.title === this.sortBy)?.sort;
    if (by) {
      const sign = this.descending ? -1 : 1;
      const order = (a, b) => (a < b ? -1 : Number(a > b));
      rows = rows.toSorted((a, b) => (a.last ? 1 : 0) - (b.last ? 1 : 0)
        || sign * order(by(a), by(b)));
    }
    const shown = new Map();
    let place = this.body.firstChild;
    for (const row of rows) {
      const key = this.keyOf(row);
      const made = this.rows.get(key) ?? this.row();
      shown.set(key, made);
      this.columns.forEach((column, i) => put(made.children[i], column.cell(row)));
      if (made === place) place = place.nextSibling;
      else this.body.insertBefore(made, place);
    }
    for (const [key, made] of this.rows) if (!shown.has(key)) made.remove();
    this.rows = shown;
    this.element.hidden = rows.length === 0;
  }

  row() {
    const made = document.createElement('tr');
    made.setAttribute('role', 'row');
    this.columns.forEach((column, i) => {
      const cell = document.createElement(i ? 'td' : 'th');
      if (!i) cell.scope = 'row';
      cell.setAttribute('role', i ? 'cell' : 'rowheader');
      cell.dataset.label = column.title;
      if (column.number) cell.className = 'number';
      if (column.text) cell.className = 'text';
      made.append(cell);
    });
    return made;
  }
}

/** Put text into a cell, or {text, state, href}, or with a meter: [part, inner, tick] of 1. */
function put(cell, value) {
  const given = typeof value === 'object' && value !== null ? value : { text: `${value}` };
  if (!cell.firstChild) {
    if (given.meter) cell.append(meter());
    cell.append(document.createElement(given.href ? 'a' : 'span'));
  }
  const span = cell.lastChild;
  if (given.href && span.getAttribute('href') !== given.href) span.href = given.href;
  if (given.href && !given.href.startsWith('#')) span.rel = 'noreferrer';
  if (span.textContent !== given.text) span.textContent = given.text;
  const state = given.state ?? '';
  if (span.className !== state) span.className = state;
  if (cell.tagName === 'TH' && cell.title !== given.text) cell.title = given.text;
  if (given.meter) setMeter(cell.firstChild, given.meter);
}

function meter() {
  const made = document.createElement('span');
  made.className = 'meter';
  made.setAttribute('aria-hidden', 'true');
  for (const name of ['', 'inner', 'tick']) {
    made.appendChild(document.createElement('i')).className = name;
  }
  return made;
}

function setMeter(made, [part, inner = null, tick = null]) {
  const [all, within, mark] = made.children;
  made.hidden = part === null;
  const width = (value) => `${Math.min(100, Math.max(0, value * 100)).toFixed(1)}%`;
  all.style.width = width(part ?? 0);
  within.hidden = inner === null;
  within.style.width = width(inner ?? 0);
  mark.hidden = tick === null;
  mark.style.left = `min(${width(tick ?? 0)}, 100% - 2px)`;
}

/** Return a table that is drawn once. */
export function plainTable(headings, rows) {
  const table = document.createElement('table');
  const head = table.createTHead().insertRow();
  for (const [i, name] of headings.entries()) {
    const cell = head.appendChild(document.createElement('th'));
    cell.scope = 'col';
    cell.textContent = name;
    if (i) cell.className = 'number';
  }
  const body = table.createTBody();
  for (const values of rows) {
    const row = body.insertRow();
    for (const [i, value] of values.entries()) {
      const cell = row.appendChild(document.createElement(i ? 'td' : 'th'));
      if (i) cell.className = 'number';
      else cell.scope = 'row';
      cell.textContent = value;
    }
  }
  return table;
}
