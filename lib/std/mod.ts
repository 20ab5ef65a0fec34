/**
 * Imports every package that the project uses: checking this one file fetches them all.
 *
 * @module
 */

import "@std/assert";
import "@std/cli";
import "@std/fs";
import "@std/jsonc";
import "@std/path";
