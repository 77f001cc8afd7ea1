/** The settings of a conversation: what the user typed, checked, and as the fields of a request. */

import { NUMBERS } from "./parameters.js";

export const LEAVE_OUT = "leave out"; // the oldest messages, when the context is full

/**
 * The fields of a request (`options`, `format`, `think`, `tools`, `truncate`), and `problems`: for each wrong field a sentence.
 * A wrong field is left out of the request, so nobody should send one while there are problems.
 */
export function readSettings(settings) {
  const problems = {};
  const note = (name, read) => {
    try {
      return read();
    } catch (error) {
      problems[name] = error.message;
      return undefined;
    }
  };
  const options = {};
  for (const number of NUMBERS) {
    const value = note(number.name, () => readNumber(settings[number.name], number));
    if (value !== undefined) options[number.name] = value;
  }
  const stop = (settings.stop ?? "").split("\n").filter((line) => line !== "");
  if (stop.length) options.stop = stop.map(unescape);
  const fields = {};
  if (Object.keys(options).length) fields.options = options;
  const format = note("schema", () => readFormat(settings));
  if (format !== undefined) fields.format = format;
  const tools = note("tools", () => readTools(settings.tools));
  if (tools?.length) fields.tools = tools;
  fields.truncate = settings.full === LEAVE_OUT;
  if (settings.think === "on" || settings.think === "off") fields.think = settings.think === "on";
  return { fields, problems };
}

/** The settings of one of several answers to the same message: with a given seed, each gets another one. */
export function withSeedOf(fields, number) {
  if (!number || fields.options?.seed === undefined) return fields;
  return { ...fields, options: { ...fields.options, seed: fields.options.seed + number } };
}

/** How many settings differ from the model's own. */
export function countSettings(settings) {
  return Object.entries(settings).filter(([name, value]) => value && name !== "schema").length;
}

function readNumber(text, { label, least, most, isAbove, isWhole }) {
  const typed = (text ?? "").trim().replace("−", "-");
  if (!typed) return undefined;
  const value = Number(typed);
  if (!Number.isFinite(value)) throw new Error(`${label} is “${typed}”, which is not a number`);
  if (isWhole && !Number.isSafeInteger(value)) throw new Error(`${label} is ${typed}, and must be a whole number`);
  const isInRange =
    (least === null || value > least || (value === least && !isAbove)) && (most === null || value <= most);
  const range = most === null ? `${isAbove ? "above" : "at least"} ${least}` : `from ${least} to ${most}`;
  if (!isInRange) throw new Error(`${label} is ${typed}, and must be ${range}`);
  return value;
}

function readFormat({ format, schema }) {
  if (format === "json") return "json";
  if (format !== "schema") return undefined;
  const value = readJson(schema, "The schema");
  if (typeof value !== "object" || value === null || Array.isArray(value))
    throw new Error("The schema is not an object");
  return value;
}

function readTools(text) {
  if (!text?.trim()) return undefined;
  const tools = readJson(text, "The list of tools");
  if (!Array.isArray(tools)) throw new Error("The tools are not a list: write [ … ]");
  tools.forEach((tool, number) => {
    if (typeof tool?.function?.name !== "string" || !tool.function.name) {
      throw new Error(`Tool ${number + 1} has no function with a name`);
    }
  });
  return tools;
}

function readJson(text, what) {
  if (!text?.trim()) throw new Error(`${what} is empty`);
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} is not JSON: ${error.message}`);
  }
}

/** A stop string is one line of a field: `\n` in it stands for a line break. */
function unescape(line) {
  return line.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);
}
