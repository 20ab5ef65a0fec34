/**
 * Asks the registry of the @std packages whether it answers, or fetches them into `vendor/` of the
 * working directory. Used by setup.sh.
 *
 * `deno run --allow-net --allow-env=JSR_URL --allow-run fetch_std.ts {ask|fetch}`: exit 0 or 1.
 *
 * @module
 */

/** Long enough for a slow line, short enough for a person whose firewall swallows the packets. */
const ASK_TIMEOUT_MS = 5_000;
const FETCH_TIMEOUT_MS = 120_000;

/** Tells whether the registry says what a registry would: not a login page, not an error. */
async function answers(): Promise<boolean> {
  const registry = Deno.env.get("JSR_URL") ?? "https://jsr.io/";
  try {
    const response = await fetch(new URL("@std/path/meta.json", registry), {
      signal: AbortSignal.timeout(ASK_TIMEOUT_MS),
    });
    const meta: unknown = await response.json();
    return response.ok && typeof meta === "object" && meta !== null && "versions" in meta;
  } catch {
    // Why it can't be reached makes no difference: there are the stand-ins.
    return false;
  }
}

/** Checking a module fetches what it imports, and unlike running it also what only types come from. */
async function fetchPackages(): Promise<boolean> {
  const { success } = await new Deno.Command(Deno.execPath(), {
    args: ["check", "--quiet", "lib/std/mod.ts"],
    stdout: "null",
    signal: AbortSignal.timeout(FETCH_TIMEOUT_MS),
  }).output();
  return success;
}

if (import.meta.main) {
  const isDone = Deno.args[0] === "fetch" ? await fetchPackages() : await answers();
  Deno.exit(isDone ? 0 : 1);
}
