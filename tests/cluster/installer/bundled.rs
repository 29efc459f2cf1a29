//! A bundle of a test's own, installed by the executable.

use std::path::PathBuf;

use super::*;

/// Manifests that a test writes, in namespaces of its own.
pub(super) struct Bundled {
    pub(super) cluster: Arc<Cluster>,
    pub(super) names: Namespaces,
    pub(super) since: Timestamp,
    folder: tempfile::TempDir,
    levels: std::cell::RefCell<BTreeMap<&'static str, Vec<String>>>,
}

const GLOBALS: &str = "values:\n  image:\n    type: image\n    optional: true\n    default: \"\"\n    description: Image\n  \
                       namespaces.operator:\n    type: string\n    format: label\n    default: buildkit-operator\n    \
                       description: Namespace\n";

impl Bundled {
    /// A bundle with nothing but its namespace.
    pub(super) fn new(cluster: Arc<Cluster>, prefix: &str) -> anyhow::Result<Self> {
        let names = cluster.namespaces(prefix);
        let folder = tempfile::tempdir()?;
        let bundle = Self { cluster, names, since: Timestamp::now(), folder, levels: std::cell::RefCell::default() };
        bundle.write("manifests/globals.yaml", GLOBALS)?;
        let namespace = format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {}}}\n", bundle.names.operator);
        bundle.component("rc0", "base", "", &namespace)?;
        Ok(bundle)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().context("no folder")?)?;
        Ok(std::fs::write(path, text)?)
    }

    /// Sets a component: what else its declaration says, and its objects; `NS`
    /// in them is the namespace.
    pub(super) fn component(
        &self,
        level: &'static str,
        name: &str,
        declared: &str,
        objects: &str,
    ) -> anyhow::Result<()> {
        let objects = fill(objects, &self.names.operator);
        let declared = fill(declared, &self.names.operator);
        let images = images(name, &objects);
        self.write(&format!("manifests/{name}/component.yaml"), &format!("description: {name}\n{declared}{images}"))?;
        self.write(&format!("manifests/{name}/objects.yaml"), &objects)?;
        let mut levels = self.levels.borrow_mut();
        levels.values_mut().for_each(|names| names.retain(|other| other != name));
        levels.entry(level).or_default().push(name.to_owned());
        drop(levels);
        self.profile()
    }

    /// Adds a template to a component.
    pub(super) fn template(&self, component: &str, text: &str) -> anyhow::Result<()> {
        self.write(&format!("manifests/{component}/template.yaml.j2"), &fill(text, &self.names.operator))
    }

    /// Takes a component out.
    pub(super) fn without(&self, name: &str) -> anyhow::Result<()> {
        std::fs::remove_dir_all(self.path(&format!("manifests/{name}")))?;
        self.levels.borrow_mut().values_mut().for_each(|names| names.retain(|other| other != name));
        self.profile()
    }

    fn profile(&self) -> anyhow::Result<()> {
        let levels = self.levels.borrow();
        let lines = levels.iter().map(|(level, names)| format!("  {level}: [{}]\n", names.join(", ")));
        self.write("profiles/default.yaml", &format!("description: test\nrunlevels:\n{}", lines.collect::<String>()))
    }

    pub(super) fn client(&self) -> Client {
        self.cluster.client()
    }

    pub(super) fn namespace(&self) -> &str {
        &self.names.operator
    }

    pub(super) fn command(&self, verb: &str, args: &[&str]) -> Command {
        let mut command = bko_install();
        command.args(["cluster", verb]).arg("--kubeconfig").arg(self.cluster.kubeconfig());
        if !matches!(verb, "init" | "plan" | "check") {
            command.args(["--namespace", &self.names.operator]);
        } else {
            command.arg("--bundle").arg(self.folder.path());
            command.args(["--image", IMAGE]).arg(format!("--set=namespaces.operator={}", self.names.operator));
        }
        if verb == "init" && !args.iter().any(|arg| arg.starts_with("--timeout")) {
            command.arg("--timeout=60s");
        }
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command
    }

    pub(super) async fn run(&self, verb: &str, args: &[&str]) -> anyhow::Result<Run> {
        Run::new(self.command(verb, args).output().await?)
    }

    pub(super) async fn init(&self, args: &[&str]) -> anyhow::Result<Run> {
        self.run("init", args).await
    }

    /// `kubectl` with this manifest on its standard input; `NS` is the namespace.
    pub(super) async fn kubectl(&self, args: &[&str], manifest: &str) -> anyhow::Result<String> {
        use tokio::io::AsyncWriteExt;
        let mut kubectl = self.cluster.tools().command("kubectl");
        kubectl.arg("--kubeconfig").arg(self.cluster.kubeconfig()).args(["--namespace", self.namespace()]).args(args);
        kubectl.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Command::from(kubectl).spawn()?;
        let mut input = child.stdin.take().context("no input")?;
        input.write_all(fill(manifest, &self.names.operator).as_bytes()).await?;
        drop(input);
        let output = child.wait_with_output().await?;
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        anyhow::ensure!(output.status.success(), "kubectl {args:?}: {err}");
        Ok(String::from_utf8(output.stdout)?)
    }

    pub(super) async fn create_namespace(&self) -> anyhow::Result<()> {
        let namespace = json!({"metadata": {"name": self.namespace()}});
        Api::<Namespace>::all(self.client())
            .create(&PostParams::default(), &serde_json::from_value(namespace)?)
            .await?;
        Ok(())
    }

    /// One object as the API server has it.
    pub(super) async fn get(&self, kind: &str, name: &str) -> anyhow::Result<Value> {
        Ok(serde_json::from_str(
            &self.kubectl(&["get", kind, name, "--output=json", "--show-managed-fields"], "").await?,
        )?)
    }

    pub(super) async fn exists(&self, kind: &str, name: &str) -> anyhow::Result<bool> {
        let out = self.kubectl(&["get", kind, name, "--ignore-not-found", "--output=name"], "").await?;
        Ok(!out.trim().is_empty())
    }

    /// Writes of this installer in this namespace since this began, leases left out.
    pub(super) async fn writes(&self) -> anyhow::Result<Vec<String>> {
        let all = self.cluster.audit().writes_by(AGENT, self.since).await?;
        let ours: Vec<Write> = all
            .into_iter()
            .filter(|write| write.namespace == self.namespace() || write.name == self.namespace())
            .collect();
        Ok(texts(&ours).into_iter().filter(|text| !text.ends_with("leases")).collect())
    }

    pub(super) async fn record(&self) -> anyhow::Result<Value> {
        record(&self.client(), self.namespace()).await?.context("no record")
    }
}

/// Images are values: declares those that are written into manifests.
fn images(component: &str, objects: &str) -> String {
    let found = objects.split("image: '").skip(1).filter_map(|rest| rest.split('\'').next());
    let found: Vec<&str> = found.collect();
    if found.is_empty() {
        return String::new();
    }
    let names: Vec<String> = (0..found.len()).map(|n| format!("{component}.image{n}")).collect();
    let value = |(name, image): (&String, &&str)| {
        format!("  {name}: {{type: image, default: '{image}', description: Image}}\n")
    };
    let values: String = names.iter().zip(&found).map(value).collect();
    format!("images: [{}]\nvalues:\n{values}", names.join(", "))
}

/// Puts the namespace where `NS` stands by itself: random text may hold these
/// letters, too.
fn fill(text: &str, namespace: &str) -> String {
    let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '=' | '_');
    let mut filled = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("NS") {
        let before = rest[..at].chars().next_back().or(filled.chars().next_back());
        let (head, tail) = (&rest[..at], &rest[at + 2..]);
        let alone = !before.is_some_and(is_word) && !tail.chars().next().is_some_and(is_word);
        filled += head;
        filled += if alone { namespace } else { "NS" };
        rest = tail;
    }
    filled + rest
}
