/** What the tests of schedules share: readers of what is generated, and words that break bad quoting. */
// deno-lint-ignore-file no-import-prefix -- the import map is for what the programs use
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import { fc } from "./deps.ts";
import { ROOT, type Scratch, writeScript } from "./helpers.ts";
export { Cron } from "npm:croner@10.0.1";
export { DOMParser } from "npm:@xmldom/xmldom@0.9.8";
export { parse as parseYaml } from "npm:yaml@2.8.1";

/** A word with what shells, cron, systemd, XML, YAML and Windows treat in their own way. */
export const nastyWord: fc.Arbitrary<string> = fc.string({
  unit: fc.oneof(
    {
      weight: 3,
      arbitrary: fc.constantFrom(
        ...` '"\\%$\`!#&;|*?~(){}[]<>@:=,-\u00e9\u00a0\u2028\u0085\ud83d\ude80`,
      ),
    },
    { weight: 1, arbitrary: fc.string({ unit: "grapheme", minLength: 1, maxLength: 1 }) },
  ),
  minLength: 1,
  maxLength: 12,
  // deno-lint-ignore no-control-regex -- what checkUnitValue refuses
}).filter((word) => !/[\u0000-\u001f\u007f\ufffe\uffff]/.test(word) && word.isWellFormed());

/** An absolute path of such words. */
export const nastyPath: fc.Arbitrary<string> = fc.array(
  nastyWord.map((word) => word.replaceAll("/", "_")).filter((word) => !/^\.+$/.test(word)),
  { minLength: 1, maxLength: 4 },
).map((words) => `/${words.join("/")}`);

/** Programs that stand in for those of a scheduler, first on the PATH of a scratch folder. */
export interface Fakes {
  /** What they need in the environment. */
  readonly env: Readonly<Record<string, string>>;
  /** The folder with their state. */
  readonly dir: string;
  /** How they were called since this was asked last. */
  readonly takeCalls: () => string[];
  /** What one of them does before all else; null for nothing. */
  readonly tell: (name: string, script: string | null) => void;
}

/**
 * Puts stand-ins on the PATH. Those of schedulers that are not named are found and do not work, so that no
 * test touches this machine's own.
 *
 * @param names Of crontab, systemctl, launchctl, schtasks.
 */
export function makeFakes(scratch: Scratch, ...names: readonly string[]): Fakes {
  const dir = join(scratch.dir, "fakes");
  Deno.mkdirSync(dir, { recursive: true });
  for (const name of ["crontab", "systemctl", "launchctl", "schtasks", "loginctl"]) {
    const path = join(scratch.bin, name);
    if (!names.includes(name)) writeScript(path, `#!/bin/sh\necho "${name}: no" >&2\nexit 9\n`);
    else {
      Deno.copyFileSync(join(ROOT, "tests", "fixtures", "schedule", `${name}.sh`), path);
      Deno.chmodSync(path, 0o755);
    }
  }
  const calls = join(dir, "calls");
  return {
    env: { FAKE_DIR: dir },
    dir,
    takeCalls: () => {
      const text = existsSync(calls) ? Deno.readTextFileSync(calls) : "";
      if (existsSync(calls)) Deno.removeSync(calls);
      return text.split("\n").filter((line) => line !== "");
    },
    tell: (name, script) => {
      const path = join(dir, `${name}.sh`);
      if (script !== null) Deno.writeTextFileSync(path, script);
      else if (existsSync(path)) Deno.removeSync(path);
    },
  };
}
