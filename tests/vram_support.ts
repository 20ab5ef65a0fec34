/** What the tests of vram-detect share: bytes as a file, shapes of families, settings, devices. */
import { type Scratch, writeFile } from "./helpers.ts";
import { buildFamily } from "./gguf_builder.ts";
import {
  type ByteSource,
  type CacheSettings,
  describeModel,
  type DeviceReport,
  type GgufFile,
  type LayerShape,
  type ModelShape,
  readGguf,
} from "../scripts/vram-detect.ts";
import { join } from "@std/path";

export const MIB = 1024 * 1024;
export const GIB = 1024 * MIB;

/** How a model is run where a test does not say otherwise. */
export const F16: CacheSettings = { kvTypeK: "f16", kvTypeV: "f16", slots: 1, ubatchTokens: 512 };

/** Bytes in memory as a file. */
export function sourceOf(bytes: Uint8Array): ByteSource {
  return {
    sizeBytes: bytes.length,
    readAt(offset, into) {
      const part = bytes.subarray(offset, offset + into.length);
      into.set(part);
      return part.length;
    },
  };
}

/** Reads bytes as a GGUF file. */
export function readBytes(bytes: Uint8Array): GgufFile {
  return readGguf(sourceOf(bytes), "test.gguf");
}

/** The shape of a family of the builder's table. */
export function shapeOf(family: string): ModelShape {
  return describeModel(readBytes(buildFamily(family)));
}

/** A letter a layer: F full, s sliding, r recurrent, b attention beside a state, - nothing. */
export function lettersOf(layers: readonly LayerShape[]): string {
  return layers.map(({ keyElements, isSliding, stateBytes }) => {
    if (stateBytes > 0) return keyElements > 0 ? "b" : "r";
    if (keyElements === 0) return "-";
    return isSliding ? "s" : "F";
  }).join("");
}

/** One card with memory of its own. */
export function cardOf(freeBytes: number | null, totalBytes: number | null): DeviceReport {
  return {
    id: "0",
    name: "card",
    kind: "discrete",
    total_bytes: totalBytes,
    free_bytes: freeBytes,
    unknown_reason: freeBytes === null ? "for a test" : null,
    note: null,
  };
}

/** Writes a family's file into the scratch project; returns its path. */
export function writeFamily(scratch: Scratch, family: string, name = "model.gguf"): string {
  const path = join(scratch.project, name);
  Deno.writeFileSync(path, buildFamily(family));
  return path;
}

/** Writes the project's models.json. */
export function writeModels(scratch: Scratch, models: unknown): void {
  writeFile(join(scratch.project, ".automaton", "models.json"), JSON.stringify(models));
}

/** Follows a path of field names in parsed JSON; undefined where it ends early. */
export function at(value: unknown, ...path: (string | number)[]): unknown {
  let here = value;
  for (const name of path) {
    if (typeof here !== "object" || here === null) return undefined;
    here = Reflect.get(here, name);
  }
  return here;
}
