/** What the tests of install.sh and update.sh share: checkouts of their own, and running sh in them. */
import { copySync, existsSync } from "@std/fs";
import { basename, join } from "@std/path";
import { git, ROOT, run, type RunOptions, type Scratch, writeScript } from "./helpers.ts";
import type { Result } from "./helpers.ts";

/** Neither install.sh nor update.sh is for Windows without sh. */
export const HAS_SH = Deno.build.os !== "windows";

/** Tests that need another user can only make one as root. */
export const IS_ROOT = Deno.build.os !== "windows" && Deno.uid() === 0;

/** No program: install.sh then writes launchers, without looking for a base to compile with. */
export const NO_BASE = "/no/denort";

/** The environment with which install.sh makes launchers, fast. */
export const LAUNCHERS: Readonly<Record<string, string>> = {
  AUTOMATON_DENO: Deno.execPath(),
  DENORT_BIN: NO_BASE,
};

/** What a clone holds, but for tests and documents. */
const CHECKOUT = [
  ".gitignore",
  "config.md",
  "deno.json",
  "install.sh",
  "lib",
  "prompts",
  "scripts",
  "templates",
  "update.sh",
];

/** Copies this checkout as a newcomer has it, and the packages, so that no registry is asked for them. */
export function copyCheckout(dir: string, withPackages = true): string {
  Deno.mkdirSync(dir, { recursive: true });
  for (const name of [...CHECKOUT, ...withPackages ? ["vendor"] : []]) {
    if (existsSync(join(ROOT, name))) copySync(join(ROOT, name), join(dir, name));
  }
  return dir;
}

/** A checkout that is a git repository with one commit. */
export function makeCheckout(scratch: Scratch, name = "check out"): string {
  const dir = copyCheckout(join(scratch.dir, name));
  git(scratch, dir, "init", "--quiet");
  git(scratch, dir, "add", "--all");
  git(scratch, dir, "commit", "--quiet", "-m", "a version");
  return dir;
}

/** Runs a script of a checkout with sh, as launchers' environment says unless told otherwise. */
export function runSh(
  scratch: Scratch,
  script: string,
  args: readonly string[] = [],
  options: RunOptions & { readonly shell?: readonly string[] } = {},
): Promise<Result> {
  const { shell = ["sh"], ...rest } = options;
  return run(scratch, [...shell, script, ...args], {
    cwd: scratch.home,
    ...rest,
    env: { ...LAUNCHERS, ...rest.env },
  });
}

/** The shells of this machine that install.sh has to run under, as words in front of the script. */
export const SHELLS: readonly (readonly string[])[] = [["dash"], ["bash"], ["busybox", "sh"]];

/** Tells whether a program is on the test's PATH. */
export function isInstalled(program: string): boolean {
  const { success } = new Deno.Command("sh", {
    args: ["-c", 'command -v "$1"', "sh", program],
    stdout: "null",
  }).outputSync();
  return success;
}

/**
 * Makes a PATH folder that holds links to some programs of this machine and nothing else.
 *
 * @returns its path
 */
export function makePath(scratch: Scratch, programs: readonly string[]): string {
  const dir = join(scratch.dir, "only these");
  Deno.mkdirSync(dir);
  for (const program of programs) {
    const folder = ["/usr/bin", "/bin", "/usr/local/bin"].find((f) => existsSync(join(f, program)));
    if (folder !== undefined) Deno.symlinkSync(join(folder, program), join(dir, program));
  }
  return dir;
}

/**
 * Puts a crontab on PATH that keeps its table in a file, as the real one does, and a systemctl that finds
 * no user session, so that cron is chosen.
 *
 * @returns the table's path; it is there when a crontab was installed
 */
export function fakeCron(scratch: Scratch): string {
  const table = join(scratch.dir, "crontab");
  writeScript(
    join(scratch.bin, "crontab"),
    `#!/bin/sh
table='${table.replaceAll("'", `'\\''`)}'
case $1 in
  -l) cat "$table" 2>/dev/null || { echo "no crontab for test" >&2; exit 1; } ;;
  -*) exit 2 ;;
  *) cat -- "$1" >"$table" ;;
esac
`,
  );
  writeScript(
    join(scratch.bin, "systemctl"),
    "#!/bin/sh\necho 'Failed to connect to bus: No medium found' >&2\nexit 1\n",
  );
  return table;
}

/** What a folder's entries are called, sorted. */
export function names(dir: string): string[] {
  return [...Deno.readDirSync(dir)].map(({ name }) => name).sort();
}

/** Identity of each program in bin/: another file, or another content, shows. */
export function programIdentities(checkout: string): string[] {
  const bin = join(checkout, "bin");
  return names(bin).map((name) => {
    const { ino, size, mtime } = Deno.statSync(join(bin, name));
    return `${basename(name)} ${ino} ${size} ${mtime?.getTime()}`;
  });
}

/** What git sees as changed in a checkout: nothing after an uninstall. */
export function gitStatus(scratch: Scratch, checkout: string): string {
  return git(scratch, checkout, "status", "--porcelain");
}

/** Why programs cannot be compiled in tests here; null where a base was named or may be fetched. */
export const NO_COMPILE_REASON = Deno.env.get("DENORT_BIN") ||
    Deno.env.get("AUTOMATON_TEST_NETWORK")
  ? null
  : "neither DENORT_BIN nor AUTOMATON_TEST_NETWORK is set";
