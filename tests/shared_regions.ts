/**
 * The rules that let the scripts share code without importing each other: a copied helper stands between
 * `// #region shared:<name>` and `// #endregion shared:<name>`, and all copies are the same.
 *
 * Uses the parser behind `deno lint`, which is there in tests only.
 *
 * @module
 */

/** A script as it is read from disk. */
export interface Script {
  readonly name: string;
  readonly text: string;
}

/** A region or a top-level name, and where it is: lines count from 1. */
interface Place {
  readonly script: string;
  readonly name: string;
  readonly line: number;
}

interface Region extends Place {
  readonly endLine: number;
  readonly lines: readonly string[];
}

/** Collects what is wrong, each with its place: `<script>:<line>: <fault>`. */
class Faults {
  readonly list: string[] = [];

  add(place: { readonly script: string; readonly line: number }, fault: string): void {
    this.list.push(`${place.script}:${place.line}: ${fault}`);
  }
}

/**
 * Checks the shared regions, imports and top-level names of scripts.
 *
 * @param scripts All scripts that share regions.
 * @returns One line for each fault, `[]` when all is well.
 *
 * @example
 * ```ts
 * findFaults([{ name: "a.ts", text: 'import "./b.ts";' }]);
 * // ['a.ts:1: imports "./b.ts", but a script may only import @std packages and node: modules']
 * ```
 */
export function findFaults(scripts: readonly Script[]): string[] {
  const faults = new Faults();
  const regions = scripts.flatMap((script) => readRegions(script, faults));
  compareCopies(regions, faults);
  const names = scripts.flatMap((script) => {
    const own = regions.filter((region) => region.script === script.name);
    return readNames(script, faults).filter(({ line }) =>
      !own.some((region) => region.line < line && line < region.endLine)
    );
  });
  compareNames(names, faults);
  return faults.list;
}

/** Reads the regions of one script; those that are not closed, or not opened, are faults. */
function readRegions(script: Script, faults: Faults): Region[] {
  const lines = script.text.split("\n");
  const regions: Region[] = [];
  let open: Place | null = null;
  for (const [index, text] of lines.entries()) {
    const [, keyword] = /^\s*\/\/\s*#((?:end)?region)\b/.exec(text) ?? [];
    if (keyword === undefined) continue;
    const [, name] = /^\/\/ #(?:end)?region shared:([a-z0-9-]+)$/.exec(text) ?? [];
    const here = { script: script.name, line: index + 1 };
    if (name === undefined) {
      faults.add(here, `"${text.trim()}" is not of the form "// #${keyword} shared:<name>"`);
    } else if (keyword === "region") {
      if (open) faults.add(here, `region "${name}" starts inside region "${open.name}"`);
      if (regions.some((region) => region.name === name)) {
        faults.add(here, `region "${name}" is there twice`);
      }
      open = { ...here, name };
    } else if (open?.name !== name) {
      faults.add(here, `region "${name}" ends here, but it is not open`);
    } else {
      regions.push({ ...open, endLine: here.line, lines: lines.slice(open.line, index) });
      open = null;
    }
  }
  if (open) faults.add(open, `region "${open.name}" has no end`);
  return regions;
}

function compareCopies(regions: readonly Region[], faults: Faults): void {
  for (const [name, copies] of groupByName(regions)) {
    const [first, ...others] = copies;
    if (others.every((copy) => copy.script === first.script)) {
      faults.add(first, `region "${name}" is in no other script`);
    }
    for (const copy of others) {
      const length = Math.max(first.lines.length, copy.lines.length);
      for (let i = 0; i < length; i++) {
        if (first.lines[i] === copy.lines[i]) continue;
        const place = { script: copy.script, line: copy.line + 1 + i };
        faults.add(place, `region "${name}" differs from ${first.script}:${first.line + 1 + i}`);
        break;
      }
    }
  }
}

function compareNames(names: readonly Place[], faults: Faults): void {
  for (const [name, [first, ...others]] of groupByName(names)) {
    // A second declaration in one script is an overload, or the compiler's concern.
    for (const other of others.filter(({ script }) => script !== first.script)) {
      faults.add(other, `"${name}" is also declared at ${first.script}:${first.line}`);
    }
  }
}

function groupByName<T extends Place>(places: readonly T[]): Map<string, [T, ...T[]]> {
  const groups = new Map<string, [T, ...T[]]>();
  for (const place of places) {
    const group = groups.get(place.name);
    if (group) group.push(place);
    else groups.set(place.name, [place]);
  }
  return groups;
}

/** Reads the names that a script declares at top level; imports that are not allowed are faults. */
function readNames(script: Script, faults: Faults): Place[] {
  const names: Place[] = [];
  const placeOf = (node: { range: [number, number] }): Place => {
    const line = script.text.slice(0, node.range[0]).split("\n").length;
    return { script: script.name, name: "", line };
  };
  const checkImport = (node: Deno.lint.Node, source: Deno.lint.Node | null): void => {
    if (source === null) return;
    const specifier = source.type === "Literal" ? source.value : null;
    if (typeof specifier === "string" && /^(@std\/|node:)/.test(specifier)) return;
    const what = typeof specifier === "string" ? `"${specifier}"` : "a computed name";
    faults.add(
      placeOf(node),
      `imports ${what}, but a script may only import @std packages and node: modules`,
    );
  };
  const rule: Deno.lint.Rule = {
    create: () => ({
      Program(program) {
        for (const statement of program.body) {
          for (const name of declaredNames(statement)) {
            names.push({ ...placeOf(statement), name });
          }
        }
      },
      ImportDeclaration: (node) => checkImport(node, node.source),
      ImportExpression: (node) => checkImport(node, node.source),
      ExportAllDeclaration: (node) => checkImport(node, node.source),
      ExportNamedDeclaration: (node) => checkImport(node, node.source),
    }),
  };
  Deno.lint.runPlugin({ name: "shared-regions", rules: { read: rule } }, script.name, script.text);
  return names;
}

function declaredNames(node: Deno.lint.Node): string[] {
  switch (node.type) {
    case "ExportNamedDeclaration":
    case "ExportDefaultDeclaration":
      return node.declaration ? declaredNames(node.declaration) : [];
    case "VariableDeclaration":
      return node.declarations.flatMap(({ id }) => boundNames(id));
    case "FunctionDeclaration":
    case "ClassDeclaration":
    case "TSDeclareFunction":
    case "TSEnumDeclaration":
    case "TSInterfaceDeclaration":
    case "TSModuleDeclaration":
    case "TSTypeAliasDeclaration":
      return node.id?.type === "Identifier" ? [node.id.name] : [];
    default:
      return [];
  }
}

/** Lists the names that a pattern such as `{ a, b: [c] }` declares. */
function boundNames(pattern: Deno.lint.Node | null): string[] {
  switch (pattern?.type) {
    case "Identifier":
      return [pattern.name];
    case "AssignmentPattern":
      return boundNames(pattern.left);
    case "RestElement":
      return boundNames(pattern.argument);
    case "ArrayPattern":
      return pattern.elements.flatMap(boundNames);
    case "ObjectPattern":
      return pattern.properties.flatMap((property) =>
        boundNames(property.type === "Property" ? property.value : property)
      );
    default:
      return [];
  }
}
