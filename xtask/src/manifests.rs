//! What the chart's manifests must hold, with whatever values: text in, findings out. It knows neither helm nor values.

/// What is wrong with the manifests of any values file.
pub(crate) fn findings(manifests: &str) -> Vec<&'static str> {
    let rules = [
        (manifests.contains("kind: "), "nothing is rendered"),
        (deletes_its_tests(manifests), "a pod of `helm test` stays when it has succeeded"),
        (keeps_replicas_without_metrics(manifests), "KEDA takes missing metrics for no load"),
        (
            !manifests.contains("restartPolicy: OnFailure"),
            "a pod that failed goes with its log: restartPolicy",
        ),
        (!has_float(manifests), "a flag has an integer as 1e+06: use int64"),
        (scrapes_running_pods(manifests), "a pod that waits for its image or model is a target that is down"),
        (
            stateful_sets_have_disks(manifests),
            "a StatefulSet has no disk: when its node is lost, its pod is not replaced",
        ),
    ];
    rules.iter().filter(|(holds, _)| !holds).map(|(_, finding)| *finding).collect()
}

/// The templates of pods, one for each workload and Job. A change of one restarts pods.
pub(crate) fn pod_templates(manifests: &str) -> Vec<String> {
    let lines: Vec<&str> = manifests.lines().collect();
    let starts = lines.iter().enumerate().filter(|(_, line)| {
        // Of a Deployment, StatefulSet or Job; of a LeaderWorkerSet.
        matches!(line.trim_start(), "template:" | "workerTemplate:")
    });
    starts
        .map(|(idx, line)| {
            let is_within = |other: &&&str| other.trim().is_empty() || indent(other) > indent(line);
            let within: Vec<&str> = lines[idx + 1..].iter().take_while(is_within).copied().collect();
            within.join("\n")
        })
        .collect()
}

/// Whether there are objects of this kind, and each has the label itself: not its pods alone.
pub(crate) fn have_label(manifests: &str, kind: &str, label: &str) -> bool {
    let kind = format!("kind: {kind}");
    let (kind, label) = (kind.as_str(), format!("    {label}"));
    let mut objects =
        manifests.split("\n---\n").filter(|object| object.lines().any(|line| line == kind)).peekable();
    objects.peek().is_some()
        && objects.all(|object| {
            let about = object.split("\nspec:").next().unwrap_or_default();
            about.lines().any(|line| line == label)
        })
}

/// The memory limit of a router, and what the requests that it admits may need, in bytes. `None`: it has no limit.
pub(crate) fn router_memory(manifests: &str) -> Option<(u64, u64)> {
    const MIB: u64 = 1 << 20;
    /// Of a choice in flight: 42.6 KiB were measured.
    const CHOICE: u64 = 48 << 10;
    /// Of bodies that are read or prepared: the router's own limit.
    const BODIES: u64 = 256 * MIB;
    /// Of tokenizer, index and connections.
    const OTHER: u64 = 512 * MIB;
    let (_, router) = manifests.split_once("- name: router\n")?;
    let (_, flag) = router.split_once("--max-requests=")?;
    let max_requests: u64 = flag.lines().next()?.trim().parse().ok()?;
    let (_, limits) = router.split_once("limits:\n")?;
    let (_, memory) = limits.split_once("memory: ")?;
    let memory = memory.lines().next()?.trim();
    let limit = match (memory.strip_suffix("Gi"), memory.strip_suffix("Mi")) {
        (Some(num), _) => num.parse::<u64>().ok()? * 1024 * MIB,
        (_, Some(num)) => num.parse::<u64>().ok()? * MIB,
        (None, None) => return None,
    };
    Some((limit, max_requests * CHOICE + BODIES + OTHER))
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Whether a flag has an integer as helm reads it from a values file.
fn has_float(manifests: &str) -> bool {
    manifests.lines().any(|line| line.trim_start().starts_with("- --") && line.contains("e+0"))
}

/// Whether each test has the policy to delete its pod. What a hook makes is no part of the release: uninstalling leaves it.
fn deletes_its_tests(manifests: &str) -> bool {
    let num = |annotation| manifests.matches(annotation).count();
    num("helm.sh/hook: test") == num("helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded")
}

/// Whether each trigger of KEDA fails where Prometheus has no series, and each ScaledObject then keeps its number of replicas.
fn keeps_replicas_without_metrics(manifests: &str) -> bool {
    let num = |text| manifests.matches(text).count();
    num("type: prometheus") == num("ignoreNullValues: \"false\"")
        && num("kind: ScaledObject") == num("behavior: currentReplicas")
}

/// Whether each endpoint of a PodMonitor keeps pods of phase Running alone. Init containers run in a pod that is pending and has an address.
fn scrapes_running_pods(manifests: &str) -> bool {
    let num = |text| manifests.matches(text).count();
    num("path: /metrics") == num("- __meta_kubernetes_pod_phase")
}

/// Whether each StatefulSet has claims. A pod of a StatefulSet is replaced when it is known to have ended, which a lost node never says.
fn stateful_sets_have_disks(manifests: &str) -> bool {
    let num = |text: &str| manifests.lines().filter(|line| *line == text).count();
    num("kind: StatefulSet") == num("  volumeClaimTemplates:")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEPLOYMENT: &str = "---
apiVersion: apps/v1
kind: Deployment
metadata:
  labels: {version: \"1\"}
spec:
  replicas: 1
  template:
    metadata:
      labels: {app: a}

    spec:
      containers: []
";

    #[test]
    fn pod_templates_end_with_their_indentation() {
        let set = "---\nkind: LeaderWorkerSet\nspec:\n  leaderWorkerTemplate:\n    workerTemplate:\n      spec: {}\n  b: 1\n";
        let found = pod_templates(&[DEPLOYMENT, set].concat());
        assert_eq!(
            found,
            ["    metadata:\n      labels: {app: a}\n\n    spec:\n      containers: []", "      spec: {}"]
        );
    }

    #[test]
    fn a_label_is_of_the_object_itself() {
        let with = |metadata: &str| {
            format!(
                "---\nkind: Set\nmetadata:\n  labels:\n{metadata}spec:\n  template:\n    a: b\n---\nkind: Job\n"
            )
        };
        assert!(have_label(&with("    a: b\n"), "Set", "a: b"));
        assert!(!have_label(&with(""), "Set", "a: b"));
        assert!(!have_label(&with("    a: b\n"), "Other", "a: b"));
    }

    #[test]
    fn the_memory_of_a_router_follows_its_requests() {
        let router = "      containers:
        - name: router
          args:
            - --max-requests=16384
          resources:
            limits:
              memory: 4Gi
            requests:
              memory: 1Gi
";
        assert_eq!(router_memory(router), Some((4 << 30, 1536 << 20)));
        assert_eq!(router_memory(&router.replace("4Gi", "900Mi")), Some((900 << 20, 1536 << 20)));
        assert_eq!(router_memory(&router.replace("limits:", "other:")), None);
    }

    #[test]
    fn a_rule_that_does_not_hold_is_a_finding() {
        assert!(findings(DEPLOYMENT).is_empty());
        assert_eq!(findings("").len(), 1);
        for wrong in [
            "helm.sh/hook: test",
            "type: prometheus",
            "restartPolicy: OnFailure",
            "  - --most=1e+06",
            "kind: StatefulSet",
            "path: /metrics",
        ] {
            assert_eq!(findings(&format!("{DEPLOYMENT}{wrong}\n")).len(), 1, "{wrong}");
        }
    }
}
