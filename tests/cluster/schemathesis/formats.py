"""What the formats of /openapi.json stand for: valid texts, for the tests that must be accepted."""

import schemathesis
from hypothesis import strategies as st

# Few projects, so that most calls find a daemon that runs already.
HOSTS = ["github.com", "gitlab.example.org:8443", "[2001:db8::1]", "git.example"]
PATHS = ["acme/shop", "Acme/Shop.git", "a/b/c", "x"]
FORMS = ["https://{}/{}", "ssh://git@{}/{}", "git+https://u:p@{}/{}/", "{}/{}?ref=main#top"]

schemathesis.openapi.format(
    "git-reference",
    st.one_of(
        st.builds(lambda form, host, path: form.format(host, path), *map(st.sampled_from, [FORMS, HOSTS, PATHS])),
        st.sampled_from(["git@github.com:acme/shop.git", "git@git.example:123/x", "shop", " acme/shop "]),
    ),
)
schemathesis.openapi.format("label", st.sampled_from(["", "web", "Release", "é" * 64, " a b ", "-" * 128]))
