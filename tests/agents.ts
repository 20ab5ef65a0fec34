/**
 * Agents for tests that run them for real: installed once from npm, at exact versions and without their
 * install scripts, into `.cache/agents/` of this checkout.
 */
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import { ROOT } from "./helpers.ts";

/** An agent that can be run here, or why it cannot. */
export type Agent = { readonly program: string } | { readonly problem: string };

/** Agents by name: the package for Linux on x86-64 and the program in it. */
const PACKAGES = {
  opencode: { spec: "opencode-linux-x64@1.18.34", program: "opencode-linux-x64/bin/opencode" },
  codex: {
    spec: "@openai/codex@0.171.0-linux-x64",
    program: "@openai/codex/vendor/x86_64-unknown-linux-musl/bin/codex",
  },
} as const;

/** An agent's name. */
export type AgentName = keyof typeof PACKAGES;

const INSTALL_TIMEOUT_MS = 180_000;

/** Installs an agent unless that was done before. */
export async function findAgent(name: AgentName): Promise<Agent> {
  const { spec, program } = PACKAGES[name];
  if (Deno.build.os !== "linux" || Deno.build.arch !== "x86_64") {
    return { problem: `${name} is only run on Linux on x86-64` };
  }
  const dir = join(ROOT, ".cache", "agents", spec.replaceAll(/[^\w.-]+/g, "-"));
  const installed = { program: join(dir, "node_modules", program) };
  if (existsSync(installed.program)) return installed;
  const problem = await install(spec, dir);
  if (problem !== null) return { problem: `${name}: ${problem}` };
  return existsSync(installed.program)
    ? installed
    : { problem: `${name}: ${spec} holds no ${program}` };
}

/** Puts a package into a folder, whole or not at all; returns what went wrong, else null. */
async function install(spec: string, dir: string): Promise<string | null> {
  console.log(`installing ${spec} with npm into ${dir}`);
  Deno.mkdirSync(join(dir, ".."), { recursive: true });
  const work = Deno.makeTempDirSync({ dir: join(dir, ".."), prefix: ".new-" });
  try {
    const { success, stderr } = await new Deno.Command("npm", {
      args: [
        "install",
        "--ignore-scripts",
        "--no-save",
        "--no-audit",
        "--no-fund",
        "--prefix",
        work,
        spec,
      ],
      env: {
        npm_config_cache: join(work, "npm"),
        npm_config_update_notifier: "false",
        npm_config_fetch_retries: "0",
      },
      stdin: "null",
      stdout: "null",
      stderr: "piped",
      signal: AbortSignal.timeout(INSTALL_TIMEOUT_MS),
    }).output();
    if (!success) return `npm failed: ${new TextDecoder().decode(stderr).trim().split("\n")[0]}`;
    Deno.removeSync(join(work, "npm"), { recursive: true });
    // Another test run may have been faster; its copy is as good.
    if (!existsSync(dir)) Deno.renameSync(work, dir);
    return null;
  } catch (error) {
    return `npm cannot be run: ${(error as Error).message}`;
  } finally {
    if (existsSync(work)) Deno.removeSync(work, { recursive: true });
  }
}

/** What a name of an ignored test ends with. */
export function describeProblem(agent: Agent): string {
  return "problem" in agent ? ` [ignored: ${agent.problem}]` : "";
}
