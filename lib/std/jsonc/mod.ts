/**
 * Stand-in for `@std/jsonc` 1.0.2: `parse`.
 *
 * @module
 */

/** A value that JSON can hold. */
export type JsonValue =
  | { [key: string]: JsonValue | undefined }
  | JsonValue[]
  | string
  | number
  | boolean
  | null;

const STRING = String.raw`"[^"\\]*(?:\\[^][^"\\]*)*"`;
const STRING_OR_COMMENT = new RegExp(String.raw`(${STRING})|//[^\r\n]*|/\*[^]*?\*/`, "g");
/** The end of a value, with the comma that follows it when nothing but a closing bracket comes next. */
const VALUE_END = new RegExp(String.raw`(${STRING}|[^\s,\[{:"])(?:(\s*),(?=\s*[\]}]))?`, "g");

/**
 * Parses JSON with line comments, block comments and trailing commas.
 *
 * @param text The document.
 * @returns Its value.
 * @throws {SyntaxError} If the text is not JSONC.
 *
 * @example
 * ```ts
 * parse('{"a": [1, 2,], } // why'); // { a: [1, 2] }
 * ```
 */
export function parse(text: string): JsonValue {
  try {
    return JSON.parse(text);
  } catch {
    return JSON.parse(toJson(text));
  }
}

/** Replaces comments and trailing commas by spaces, so that positions in errors stay true. */
function toJson(text: string): string {
  return text
    .replace(
      STRING_OR_COMMENT,
      (found, string?: string) => string ?? found.replace(/[^\r\n]/g, " "),
    )
    .replace(
      VALUE_END,
      (_, value: string, space?: string) => space === undefined ? value : `${value}${space} `,
    );
}
