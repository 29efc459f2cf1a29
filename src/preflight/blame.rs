//! Who may have changed a pod: the mutating policies and webhooks that see pods
//! of a namespace. Pure.

use serde_json::Value;

use super::admission::Mutation;

/// What intercepts the creation of objects.
#[derive(Clone, Debug, Default)]
pub struct Interceptors {
    /// MutatingAdmissionPolicies.
    pub policies: Vec<Value>,
    /// Their bindings; a policy without one does nothing.
    pub bindings: Vec<Value>,
    /// MutatingWebhookConfigurations.
    pub webhooks: Vec<Value>,
    /// LimitRanges of the namespace.
    pub limits: Vec<Value>,
}

/// Who can have made these changes, for a sentence; empty when nobody is known.
/// A policy that names a changed field is certain; a webhook is only possible.
pub fn suspects(mutations: &[&Mutation], all: &Interceptors, labels: &Value) -> Vec<String> {
    let mut suspects = Vec::new();
    let resources_only = mutations.iter().all(|m| m.path.contains(".limits") || m.path.contains(".requests"));
    if resources_only {
        suspects.extend(all.limits.iter().map(|limit| format!("LimitRange \"{}\"", name(limit))));
    }
    let active: Vec<&Value> = all.policies.iter().filter(|policy| is_active(policy, all, labels)).collect();
    let naming: Vec<&Value> = active.iter().copied().filter(|policy| names_a_field(policy, mutations)).collect();
    let policies = if naming.is_empty() { &active } else { &naming };
    suspects.extend(policies.iter().map(|policy| format!("MutatingAdmissionPolicy \"{}\"", name(policy))));
    if naming.is_empty() {
        for configuration in &all.webhooks {
            let hooks = configuration["webhooks"].as_array().into_iter().flatten();
            for hook in hooks.filter(|hook| sees_pods(&hook["rules"]) && selects(&hook["namespaceSelector"], labels)) {
                let hook = hook["name"].as_str().unwrap_or_default();
                suspects
                    .push(format!("webhook \"{hook}\" of MutatingWebhookConfiguration \"{}\"", name(configuration)));
            }
        }
    }
    suspects
}

fn name(object: &Value) -> &str {
    object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default()
}

fn is_active(policy: &Value, all: &Interceptors, labels: &Value) -> bool {
    let constraints = &policy["spec"]["matchConstraints"];
    let bound = all.bindings.iter().any(|binding| {
        binding["spec"]["policyName"] == name(policy)
            && selects(&binding["spec"]["matchResources"]["namespaceSelector"], labels)
    });
    bound && sees_pods(&constraints["resourceRules"]) && selects(&constraints["namespaceSelector"], labels)
}

/// Whether the policy's expressions contain the last name of a changed field.
fn names_a_field(policy: &Value, mutations: &[&Mutation]) -> bool {
    let text = policy["spec"]["mutations"].to_string();
    mutations.iter().any(|mutation| {
        let field = mutation.path.rsplit('.').next().unwrap_or_default();
        let field = field.split('[').next().unwrap_or_default();
        !field.is_empty() && text.contains(field)
    })
}

/// Rules of webhooks and of policies have the same fields.
fn sees_pods(rules: &Value) -> bool {
    let has = |rule: &Value, field: &str, wanted: &[&str]| {
        let items = rule[field].as_array().into_iter().flatten().filter_map(Value::as_str);
        items.into_iter().any(|item| wanted.contains(&item))
    };
    rules.as_array().into_iter().flatten().any(|rule| {
        has(rule, "apiGroups", &["", "*"])
            && has(rule, "resources", &["pods", "*", "*/*", "pods/*"])
            && has(rule, "operations", &["CREATE", "*"])
    })
}

/// Whether a label selector matches; an absent one does.
pub fn selects(selector: &Value, labels: &Value) -> bool {
    let label = |key: &str| labels.get(key).and_then(Value::as_str);
    let equal = selector["matchLabels"].as_object().into_iter().flatten();
    let equal = equal.into_iter().all(|(key, wanted)| label(key) == wanted.as_str());
    let expressions = selector["matchExpressions"].as_array().into_iter().flatten();
    equal
        && expressions.into_iter().all(|expression| {
            let value = label(expression["key"].as_str().unwrap_or_default());
            let listed = expression["values"]
                .as_array()
                .is_some_and(|values| values.iter().filter_map(Value::as_str).any(|wanted| Some(wanted) == value));
            match expression["operator"].as_str().unwrap_or_default() {
                "In" => listed,
                "NotIn" => !listed,
                "Exists" => value.is_some(),
                "DoesNotExist" => value.is_none(),
                _ => true,
            }
        })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn policy(name: &str, expression: &str, selector: Value) -> Value {
        json!({
            "metadata": {"name": name},
            "spec": {
                "matchConstraints": {
                    "namespaceSelector": selector,
                    "resourceRules": [{"apiGroups": [""], "operations": ["CREATE"], "resources": ["pods"]}],
                },
                "mutations": [{"applyConfiguration": {"expression": expression}}],
            },
        })
    }

    fn binding(policy: &str) -> Value {
        json!({"metadata": {"name": policy}, "spec": {"policyName": policy}})
    }

    #[test]
    fn the_policy_that_names_the_field_is_blamed_alone() {
        let webhook = json!({"metadata": {"name": "mesh"}, "webhooks": [{
            "name": "inject.mesh.io", "rules": [{"apiGroups": ["*"], "operations": ["*"], "resources": ["pods"]}],
            "namespaceSelector": {"matchExpressions": [{"key": "mesh", "operator": "In", "values": ["on"]}]},
        }]});
        let mut all = Interceptors {
            policies: vec![
                policy("hardened", "Object{spec: … allowPrivilegeEscalation: false}", Value::Null),
                policy("other", "Object{metadata: …}", Value::Null),
                policy("elsewhere", "allowPrivilegeEscalation", json!({"matchLabels": {"team": "x"}})),
                policy("unbound", "allowPrivilegeEscalation", Value::Null),
            ],
            bindings: vec![binding("hardened"), binding("other"), binding("elsewhere")],
            webhooks: vec![webhook],
            limits: Vec::new(),
        };
        let escalation = Mutation {
            path: ".spec.containers[buildkitd].securityContext.allowPrivilegeEscalation".into(),
            sent: None,
            got: Some(json!(false)),
        };
        let labels = json!({"mesh": "on"});
        assert_eq!(suspects(&[&escalation], &all, &labels), ["MutatingAdmissionPolicy \"hardened\""]);
        all.policies.clear();
        assert_eq!(
            suspects(&[&escalation], &all, &labels),
            ["webhook \"inject.mesh.io\" of MutatingWebhookConfiguration \"mesh\""]
        );
        assert!(suspects(&[&escalation], &all, &json!({})).is_empty());
    }
}
