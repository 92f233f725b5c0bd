// What a running run works at, between two commits.

/**
 * Returns a line such as "step 1: 5 of 8 groups".
 * @param {any} progress answer of `/runs/{run}/progress`
 */
export function describeActivity(progress) {
  if (progress.newest_version === 0) return "starting the engine and the trainer";
  const evaluations = progress.rollouts.filter(({ kind }) => kind === "evaluation");
  const begun = evaluations.filter(({ groups }) => groups > 0);
  const activities = [
    ...(progress.has_batch ? [`training step ${progress.step}`] : []),
    ...progress.rollouts.filter(({ kind }) => kind !== "evaluation").map(describe),
  ];
  const shown = begun.length || activities.length ? begun : evaluations.slice(0, 1);
  return [...activities, ...shown.map(describe)].join("; ") || "storing the last checkpoint";
}

function describe({ kind, step, evaluation_set: set, groups, expected }) {
  const counts = `${groups} of ${expected}`;
  if (kind !== "evaluation")
    return `step ${step}: ${counts} ${kind === "fresh" ? "groups" : "re-evaluated groups"}`;
  return `evaluating ${step === 1 ? "the base model" : `version ${step}`} on ${set}: ${counts} prompts`;
}
