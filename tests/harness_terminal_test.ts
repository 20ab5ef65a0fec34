/** What a person sees of a tick, on a terminal and elsewhere. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { join } from "@std/path";
import { programArgv, run, type Scratch } from "./helpers.ts";
import { LOOP, makeLoopScratch, tick } from "./runner_support.ts";

const PLAN = {
  implement: "echo x >work.txt; printf 'half \\033[31mway\\033[0m %080d\\n' 7; sleep 3",
  verify: "verdict true 0.75",
};

const hasScript = new Deno.Command("sh", { args: ["-c", "script --version"], stderr: "null" })
  .outputSync().success;

/** Runs a tick on a pseudo terminal of 60 columns; returns what was written to it. */
async function runOnTerminal(scratch: Scratch): Promise<string> {
  const words = [...programArgv("loop-runner"), "--mode", "tick", "--loop", LOOP];
  const command = `stty cols 60 && exec ${words.map((word) => `'${word}'`).join(" ")}`;
  const { code, stdout, stderr } = await run(scratch, [
    "script",
    "--quiet",
    "--return",
    "--flush",
    "--command",
    command,
    join(scratch.dir, "typescript"),
  ], { env: { AUTOMATON_CONTEXT_TOKENS: "131072", TERM: "xterm", SHELL: "/bin/sh" } });
  assertEquals(code, 0, stdout + stderr);
  return stdout;
}

Deno.test({
  name: `a terminal shows role, time and last line of output, and at the end one line${
    hasScript ? "" : " [ignored: script(1) is not installed]"
  }`,
  ignore: !hasScript,
  async fn() {
    using scratch = makeLoopScratch(PLAN);
    const screen = await runOnTerminal(scratch);
    const updates = screen.split("\r\u001b[K");
    const shown = updates.find((update) => update.includes("half way"));
    assert(shown !== undefined, JSON.stringify(screen));
    assertMatch(shown, /^night tick 1: implement \d+ s {2}half way 0+$/);
    assertEquals(shown.length, 59, "one column less than the terminal has");
    const lines = screen.trimEnd().split("\r\n").map((line) => line.split("\r\u001b[K").at(-1)!);
    assert(lines.some((line) => /^night tick 1: implement \d+ s$/.test(line)), lines.join("\n"));
    assertEquals(
      lines.at(-1),
      "night tick 1: fix-it passed, score 0.75, implement -> code_review",
    );
  },
});

Deno.test("elsewhere a tick prints plain lines, one for each role", async () => {
  using scratch = makeLoopScratch(PLAN);
  const { stderr, json } = await tick(scratch);
  assertEquals(json.reason, null);
  assert(!stderr.includes("\r") && !stderr.includes("\u001b"), JSON.stringify(stderr));
  assertMatch(stderr, /^night tick 1: implement \d+ s\nnight tick 1: verify \d+ s\n/m);
  assert(!stderr.includes("half way"));
  assertStringIncludes(stderr, "commit");
});
