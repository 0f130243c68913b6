// Values and expectations of the step language; ../../conformance/README.md describes both.

/** Put saved values in the place of "$name", and write repetitions out. */
export function fill(value, saved) {
  if (typeof value === 'string' && value.startsWith('$')) {
    if (!(value.slice(1) in saved)) throw new Error(`nothing was saved as ${value}`);
    return saved[value.slice(1)];
  }
  if (Array.isArray(value)) return value.map((element) => fill(element, saved));
  if (!isObject(value)) return value;
  if ('$repeat' in value) {
    const [element, count] = value.$repeat;
    if (typeof element === 'string') return element.repeat(count);
    return Array.from({ length: count }, () => fill(element, saved));
  }
  const filled = Object.entries(value).map(([key, below]) => [key, fill(below, saved)]);
  return Object.fromEntries(filled);
}

/** Follow a path such as "verdicts[0].response.grant". */
export function lookUp(value, path) {
  return path.match(/\w+/g).reduce((below, name) => below[name], value);
}

/** Return the differences, one sentence each; none if it matches. */
export function mismatches(expected, actual, path = '') {
  const found = [];
  if (isObject(expected)) {
    const operators = Object.keys(expected).filter((key) => key.startsWith('$'));
    for (const operator of operators) {
      if (!(operator in OPERATORS)) throw new Error(`${operator} is no operator`);
      if (!OPERATORS[operator](expected[operator], actual)) {
        const operand = JSON.stringify(expected[operator]);
        found.push(`${path} is ${JSON.stringify(actual)}, which fails ${operator} ${operand}`);
      }
    }
    if (operators.length) return found;
    if (!isObject(actual)) return [`${path || 'the answer'} is ${actual}, not an object`];
    for (const [key, below] of Object.entries(expected)) {
      found.push(...mismatches(below, actual[key], path ? `${path}.${key}` : key));
    }
    return found;
  }
  if (Array.isArray(expected)) {
    if (!Array.isArray(actual) || actual.length !== expected.length) {
      return [`${path} is ${JSON.stringify(actual)}, not a list of ${expected.length}`];
    }
    return expected.flatMap((below, at) => mismatches(below, actual[at], `${path}[${at}]`));
  }
  if (equal(expected, actual)) return [];
  return [`${path} is ${JSON.stringify(actual)}, not ${JSON.stringify(expected)}`];
}

const matches = (expected, actual) => mismatches(expected, actual).length === 0;

const OPERATORS = {
  $min: (bound, actual) => number(actual) !== undefined && number(actual) >= BigInt(bound),
  $max: (bound, actual) => number(actual) !== undefined && number(actual) <= BigInt(bound),
  $one_of: (choices, actual) => choices.some((choice) => matches(choice, actual)),
  $not: (banned, actual) => !matches(banned, actual),
  $has: (element, actual) =>
    typeof actual === 'string'
      ? typeof element === 'string' && actual.includes(element)
      : Array.isArray(actual) && actual.some((one) => matches(element, one)),
};

function number(value) {
  if (typeof value === 'number') return BigInt(value);
  return typeof value === 'string' && /^-?\d+$/.test(value) ? BigInt(value) : undefined;
}

function equal(expected, actual) {
  const value = number(expected);
  if (value !== undefined) return value === number(actual);
  return (expected ?? null) === (actual ?? null);
}

function isObject(value) {
  return value !== null && typeof value === 'object' && !Array.isArray(value);
}
