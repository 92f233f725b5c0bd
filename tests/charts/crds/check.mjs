// `node check.mjs FILE`: a JSON list of objects against the official CRDs of their kinds: types and
// unknown fields by the declarations, values by the validators that are made from them. Says what is
// wrong and exits with 1.
import { readFileSync, writeFileSync } from "node:fs";
import ts from "typescript";

const MODULES = {
  ServiceMonitor: "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/ServiceMonitor",
  PrometheusRule: "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PrometheusRule",
  HTTPRoute: "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1/HTTPRoute",
};

const objects = JSON.parse(readFileSync(process.argv[2], "utf8"));
const wrong = [];

for (const [index, object] of objects.entries()) {
  const { [object.kind]: Model } = await import(MODULES[object.kind]);
  try {
    new Model(object).validate();
  } catch (error) {
    wrong.push(`object ${index}, ${object.kind}: ${error.message}`);
  }
}

const source = objects.map(
  ({ kind, ...rest }, index) =>
    `import type { I${kind} as T${index} } from "${MODULES[kind]}";\n` +
    `export const object${index}: T${index} = ${JSON.stringify({ ...rest, kind })};\n`,
);
writeFileSync("objects.ts", source.join(""));
const program = ts.createProgram(["objects.ts"], {
  noEmit: true,
  strict: true,
  skipLibCheck: true,
  module: ts.ModuleKind.NodeNext,
  moduleResolution: ts.ModuleResolutionKind.NodeNext,
});
for (const each of ts.getPreEmitDiagnostics(program)) {
  wrong.push(ts.flattenDiagnosticMessageText(each.messageText, " "));
}

if (wrong.length) {
  console.log(wrong.join("\n"));
  process.exit(1);
}
