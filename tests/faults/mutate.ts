/**
 * Mutation testing: changes one thing at a time in the code that everything rests on, and looks whether a
 * test notices. Prints the score and what nobody noticed.
 *
 * Usage: deno run -A tests/faults/mutate.ts [TARGET ...]
 *
 * Each mutant runs in a copy of the checkout, as many at a time as there are cores. A mutant that makes the
 * tests hang counts as noticed. Needs Deno 2.8 or newer. Not part of `tests/run`, since it takes long.
 */
// deno-lint-ignore-file no-import-prefix -- the import map is for what the programs use
import { copySync, ensureDirSync } from "@std/fs";
import { dirname, fromFileUrl, join } from "@std/path";
import ts from "npm:typescript@5.9.3";
import { EQUIVALENT, type Target, TARGETS } from "./mutation_targets.ts";

/** What is left open counts as noticed, as in `tests/run`. */
const FLAGS = "--no-check --quiet --fail-fast -A --sanitize-ops --sanitize-resources".split(" ");

const ROOT = fromFileUrl(new URL("../../", import.meta.url));

interface Mutant {
  readonly where: string;
  /** The whole line that it is in. */
  readonly line: string;
  readonly start: number;
  readonly end: number;
  readonly from: string;
  readonly to: string;
}

const SWAPS: Readonly<Record<string, readonly string[]>> = {
  "===": ["!=="],
  "!==": ["==="],
  "<": ["<=", ">="],
  "<=": ["<", ">"],
  ">": [">=", "<="],
  ">=": [">", "<"],
  "&&": ["||"],
  "||": ["&&"],
  "??": ["&&"],
  "+": ["-"],
  "-": ["+"],
  "*": ["/"],
  "/": ["*"],
};

/** What a node of the syntax tree may be changed into. */
function listReplacements(node: ts.Node): readonly string[] {
  const text = node.getText();
  if (ts.isPrefixUnaryExpression(node) && node.operator === ts.SyntaxKind.ExclamationToken) {
    return [node.operand.getText()];
  }
  if (node.kind === ts.SyntaxKind.TrueKeyword) return ["false"];
  if (node.kind === ts.SyntaxKind.FalseKeyword) return ["true"];
  if (ts.isNumericLiteral(node)) return [`${Number(text.replaceAll("_", "")) + 1}`];
  if (ts.isStringLiteral(node) || ts.isNoSubstitutionTemplateLiteral(node)) {
    return node.text === "" ? ['"mutant"'] : ['""'];
  }
  if (ts.isExpressionStatement(node) || ts.isThrowStatement(node)) return [";"];
  if (ts.isRegularExpressionLiteral(node)) return ["/(?!)/g"];
  const parent = node.parent;
  const isCondition = (ts.isIfStatement(parent) && parent.expression === node) ||
    (ts.isConditionalExpression(parent) && parent.condition === node);
  if (isCondition) return ["true", "false"];
  if (ts.isWhileStatement(parent) && parent.expression === node) return ["false"];
  const isTruth = ts.isReturnStatement(node) &&
    /^(true|false)$/.test(node.expression?.getText() ?? "");
  if (ts.isReturnStatement(node) && node.expression !== undefined && !isTruth) {
    return [`return ${node.expression.getText() === "null" ? "{}" : "null"} as never;`];
  }
  return [];
}

/** Messages are for people: nobody's behaviour follows from their words. */
function isMessage(node: ts.Node): boolean {
  for (let at: ts.Node | undefined = node; at !== undefined; at = at.parent) {
    if (ts.isNewExpression(at) || ts.isTypeNode(at)) return true;
    if (
      ts.isCallExpression(at) &&
      /^(none|warn|warnings\.push|console\.\w+)$/.test(at.expression.getText())
    ) {
      return true;
    }
    if (ts.isPropertyAssignment(at) && /^(detail|text|hint|message)$/.test(at.name.getText())) {
      return true;
    }
    if (
      ts.isVariableDeclaration(at) && /^(detail|listed|more|text|hint)$/.test(at.name.getText())
    ) return true;
  }
  return false;
}

/** All mutants of a target's functions and constants. */
function listMutants(source: ts.SourceFile, names: readonly string[]): Mutant[] {
  const mutants: Mutant[] = [];
  const left = new Set(names);
  const add = (name: string, node: ts.Node, to: string) => {
    const { line } = source.getLineAndCharacterOfPosition(node.getStart());
    mutants.push({
      where: `${name}, line ${line + 1}`,
      line: source.text.split("\n")[line]!,
      start: node.getStart(),
      end: node.getEnd(),
      from: node.getText(),
      to,
    });
  };
  const visit = (name: string, node: ts.Node): void => {
    const isText = ts.isStringLiteralLike(node) || ts.isTemplateExpression(node);
    if (!(isText && isMessage(node)) && !ts.isTypeNode(node)) {
      for (const to of listReplacements(node)) add(name, node, to);
      if (ts.isBinaryExpression(node)) {
        const operator = node.operatorToken;
        for (const to of SWAPS[operator.getText()] ?? []) add(name, operator, to);
      }
    }
    if (!ts.isTypeNode(node)) node.forEachChild((child) => visit(name, child));
  };
  source.forEachChild((node) => {
    const named = ts.isVariableStatement(node) ? node.declarationList.declarations[0] : node;
    const name = (named as { name?: ts.Identifier } | undefined)?.name?.getText() ?? "";
    if (left.delete(name)) visit(name, node);
  });
  if (left.size > 0) throw new RangeError(`Cannot mutate "${[...left]}": no such functions`);
  return mutants;
}

/** Copies what the tests need into a folder of its own. */
function makeCopy(): string {
  const dir = Deno.makeTempDirSync({ prefix: "automaton-mutants-" });
  const { stdout } = new Deno.Command("git", {
    args: ["ls-files", "-z", "--cached", "--others", "--exclude-standard"],
    cwd: ROOT,
  }).outputSync();
  for (const path of new TextDecoder().decode(stdout).split("\0").filter((each) => each !== "")) {
    ensureDirSync(dirname(join(dir, path)));
    copySync(join(ROOT, path), join(dir, path));
  }
  copySync(join(ROOT, "vendor"), join(dir, "vendor"));
  return dir;
}

/** True when the tests of a target fail in a copy, do not end, or are none. */
async function areTestsFailing(dir: string, target: Target, timeoutMs: number): Promise<boolean> {
  for (const test of target.tests) {
    const child = new Deno.Command(Deno.execPath(), {
      args: ["test", ...FLAGS, ...test],
      cwd: dir,
      env: { NO_COLOR: "1", AUTOMATON_FAULT_SEED: "1" },
      stdin: "null",
      stdout: "piped",
      stderr: "null",
    }).spawn();
    const timer = setTimeout(() => child.kill("SIGKILL"), timeoutMs);
    const { success, stdout } = await child.output();
    clearTimeout(timer);
    if (!success || !/ [1-9]\d* passed/.test(new TextDecoder().decode(stdout))) return true;
  }
  return false;
}

/** Tries all mutants of a target; prints the score and the survivors, returns how many there are. */
async function tryTarget(target: Target): Promise<number> {
  const text = Deno.readTextFileSync(join(ROOT, target.file));
  const source = ts.createSourceFile(target.file, text, ts.ScriptTarget.Latest, true);
  const mutants = listMutants(source, target.functions);
  const isEquivalent = ({ where, line, from, to }: Mutant) =>
    EQUIVALENT.some((known) =>
      where.startsWith(`${known.name},`) && from === known.from && to === known.to &&
      line.includes(known.line ?? "")
    );
  const real = mutants.filter((mutant) => !isEquivalent(mutant));
  const left = [...real];
  const survivors: Mutant[] = [];
  const work = async () => {
    const dir = makeCopy();
    const startedAt = performance.now();
    if (await areTestsFailing(dir, target, 600_000)) throw new Error("the tests fail as they are");
    const timeoutMs = 20_000 + 10 * (performance.now() - startedAt);
    for (let mutant = left.shift(); mutant !== undefined; mutant = left.shift()) {
      const { start, end, to } = mutant;
      Deno.writeTextFileSync(join(dir, target.file), text.slice(0, start) + to + text.slice(end));
      if (await areTestsFailing(dir, target, timeoutMs)) continue;
      survivors.push(mutant);
      console.log(
        `  ${mutant.where}: ${mutant.from.replace(/\s+/g, " ").slice(0, 100)}  =>  ${to}`,
      );
    }
    Deno.removeSync(dir, { recursive: true });
  };
  await Promise.all(Array.from({ length: navigator.hardwareConcurrency }, work));
  const noticed = real.length - survivors.length;
  console.log(
    `${target.name}: ${noticed} of ${real.length} mutants noticed, ${
      mutants.length - real.length
    } more change nothing`,
  );
  return survivors.length;
}

if (import.meta.main) {
  const chosen = TARGETS.filter(({ name }) => Deno.args.length === 0 || Deno.args.includes(name));
  let survivors = 0;
  for (const target of chosen) survivors += await tryTarget(target);
  Deno.exit(survivors === 0 && chosen.length > 0 ? 0 : 1);
}
