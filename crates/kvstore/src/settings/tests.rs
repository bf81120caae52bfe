#![allow(clippy::unwrap_used, clippy::panic)]
use super::*;

fn home() -> BTreeMap<String, String> {
    BTreeMap::from([("HOME".to_owned(), "/home/someone".to_owned())])
}

fn with(variables: &[(&str, &str)]) -> BTreeMap<String, String> {
    let own = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
    home().into_iter().chain(variables.iter().map(own)).collect()
}

fn load(text: &str, variables: &[(&str, &str)]) -> Result<Settings, Error> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kv.toml");
    std::fs::write(&file, text).unwrap();
    Settings::load(Some(&file), &with(variables), &[])
}

/// Loads what must be refused: one line, which says all of `says`.
fn refused(text: &str, variables: &[(&str, &str)], says: &[&str]) {
    let error = load(text, variables).err().unwrap_or_else(|| panic!("{text} {variables:?} is taken"));
    let said = error.to_string();
    assert!(matches!(error, Error::Invalid(_)) && !said.contains('\n'), "{said}");
    for part in says {
        assert!(said.contains(part), "{said:?} does not say {part:?}");
    }
}

#[test]
fn the_example_is_the_defaults() {
    let example = load(EXAMPLE, &[]).unwrap();
    let nothing = Settings::load(None, &home(), &[]).unwrap();
    assert_eq!(format!("{example:?}"), format!("{nothing:?}"));
    assert_eq!(nothing.root, Path::new("/home/someone/.local/share/deepinfer/kvstore"));
    assert_eq!(nothing.server.listen, [DEFAULT_LISTEN.parse().unwrap()]);
    assert_eq!((nothing.store.lifetimes.agent, nothing.store.lifetimes.chat), (3 * 86_400, 7 * 86_400));
    assert_eq!(nothing.store.policy, PolicyKind::MarginalHit);
}

#[test]
fn the_example_names_every_key() {
    let uncommented: String = EXAMPLE.lines().map(|line| line.trim_start_matches("# ").to_owned() + "\n").collect();
    for (key, _) in KEYS {
        let last = key.rsplit('.').next().unwrap();
        let known = ["quotas", "access_key_env", "secret_key_env", "conditional_put", "certificates"].contains(&last);
        assert!(known || uncommented.contains(&format!("{last} = ")), "{key}");
    }
}

#[test]
fn every_key_is_one_of_the_file() {
    // A value of the wrong kind is refused by the name of its key: so the key is known, and reaches the file's structure.
    let wrong = toml::Value::Array(vec![toml::Value::Array(Vec::new())]);
    for (key, _) in KEYS.iter().filter(|(key, _)| *key != "media.domains") {
        let mut table = Table::new();
        keys::set(&mut table, key, wrong.clone()).unwrap();
        let said =
            read::<raw::File>(toml::Value::Table(table), "").err().unwrap_or_else(|| panic!("{key}")).to_string();
        assert!(said.starts_with(key), "{key}: {said}");
        assert!(!said.contains("unknown field"), "{said}");
    }
}

#[test]
fn values_of_a_file_arrive() {
    let text = r#"
        root = "/srv/kv"
        listen = ["127.0.0.1:0", "unix:/run/kv.sock"]
        metrics = "off"
        [store]
        capacity = "1TiB"
        policy = "lru"
        orphan_after = 90
        [lifetimes]
        agent = "1d"
        [quotas]
        "team a" = "10GiB"
        [limits]
        max_connections = 9
        drain = "2s"
    "#;
    let settings = load(text, &[]).unwrap();
    assert_eq!((settings.root.to_str(), settings.metrics), (Some("/srv/kv"), None));
    assert_eq!(settings.server.listen[1].to_string(), "unix:/run/kv.sock");
    assert_eq!((settings.store.capacity, settings.store.policy), (1 << 40, PolicyKind::Lru));
    assert_eq!((settings.store.orphan_after.as_secs(), settings.store.lifetimes.agent), (90, 86_400));
    assert_eq!(settings.quotas, BTreeMap::from([("team a".to_owned(), 10 << 30)]));
    assert_eq!((settings.server.max_connections, settings.server.drain.as_secs()), (9, 2));
}

#[test]
fn the_environment_is_nearer_than_the_file_and_arguments_than_both() {
    let text = "[store]\ncapacity = \"1GiB\"\nslack = \"1GiB\"\npiece_bytes = 7\n";
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kv.toml");
    std::fs::write(&file, text).unwrap();
    let variables = with(&[
        ("DEEPINFER_KVSTORE_STORE_CAPACITY", "2GiB"),
        ("DEEPINFER_KVSTORE_STORE_SLACK", "2GiB"),
        ("DEEPINFER_KVSTORE_LISTEN", "127.0.0.1:1, unix:/a"),
        ("DEEPINFER_KVSTORE_QUOTAS", "a=1GiB,b=5"),
        ("DEEPINFER_KVSTORE_LIMITS_MAX_UNKNOWN", "5"),
        ("DEEPINFER_OTHER", "x"),
    ]);
    let given = [("store.slack".to_owned(), "3GiB".to_owned())];
    let settings = Settings::load(Some(&file), &variables, &given).unwrap();
    assert_eq!((settings.store.capacity, settings.store.slack, settings.store.piece_bytes), (2 << 30, 3 << 30, 7));
    assert_eq!(settings.server.listen.len(), 2);
    assert_eq!(settings.quotas, BTreeMap::from([("a".to_owned(), 1 << 30), ("b".to_owned(), 5)]));
    assert_eq!(settings.server.max_unknown, 5);
    let wrong = Settings::load(None, &home(), &[("store.size".to_owned(), "1".to_owned())]).err().unwrap();
    assert_eq!(
        wrong.to_string(),
        "--set store.size names no setting: deepinfer kvstore serve --print-settings shows all of them"
    );
    let wrong = Settings::load(None, &home(), &[("limits.max_unknown".to_owned(), "x".to_owned())]).err().unwrap();
    assert_eq!(wrong.to_string(), "--set limits.max_unknown: \"x\" is no whole number");
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    refused("roof = 1", &[], &["unknown field `roof`", "root"]);
    refused("[media]\nbucket = 1", &[], &["media", "unknown field `bucket`"]);
    refused("[store]\ncapacity = \"many\"", &[], &["store.capacity", "\"many\" is no size"]);
    refused("[store]\ncapacity = -5", &[], &["store.capacity"]);
    refused("[store]\ncapacity = 100", &[], &["store.capacity", "is too little"]);
    refused("[store]\npolicy = \"best\"", &[], &["store.policy", "lru, ttl or marginal"]);
    refused("[store]\nbatch_bytes = \"1GiB\"", &[], &["store.batch_bytes", "media.segment_bytes"]);
    refused("[store]\nmax_object = \"5GiB\"", &[], &["store.max_object"]);
    refused("[store]\npiece_bytes = 0", &[], &["store.piece_bytes"]);
    refused("[store]\nmax_object = 0", &[], &["store.max_object", "too little"]);
    refused("[store]\ntend_every = 0", &[], &["store.tend_every"]);
    refused("[lifetimes]\nchat = \"0s\"", &[], &["lifetimes.chat"]);
    refused("[lifetimes]\nbot = 1", &[], &["lifetimes", "bot"]);
    refused("[quotas]\na = []", &[], &["quotas.a"]);
    refused("listen = []", &[], &["listen", "one address"]);
    refused("listen = [\"nowhere\"]", &[], &["listen", "no address"]);
    refused("metrics = \"unix:/x\"", &[], &["metrics"]);
    refused("root = \"here\"", &[], &["root", "absolute"]);
    refused("[limits]\nrequest = 0", &[], &["limits.request"]);
    refused("[limits]\nmax_connections = 0", &[], &["limits.max_connections"]);
    refused("[tls]\nkey = \"/k\"", &[], &["tls.certificate"]);
    refused("[tls]\ncertificate = \"/k\"", &[], &["tls.key"]);
    refused("a = [\nb", &[], &["kv.toml line"]);
    refused("", &[("DEEPINFER_KVSTORE_CAPACITY", "1")], &["DEEPINFER_KVSTORE_CAPACITY names no setting"]);
    refused("", &[("DEEPINFER_KVSTORE_LIMITS_MAX_UNKNOWN", "x")], &["DEEPINFER_KVSTORE_LIMITS_MAX_UNKNOWN"]);
    refused("", &[("DEEPINFER_KVSTORE_QUOTAS", "x")], &["DEEPINFER_KVSTORE_QUOTAS", "name=value"]);
    refused("store = 5", &[("DEEPINFER_KVSTORE_STORE_SLACK", "1")], &["store is no table"]);
    let nowhere = Settings::load(Some(Path::new("/nowhere/kv.toml")), &home(), &[]).err().unwrap();
    assert!(matches!(nowhere, Error::Invalid(_)) && nowhere.to_string().contains("/nowhere/kv.toml"));
}

#[test]
fn tokens_come_from_files_and_variables_and_are_never_shown() {
    let folder = tempfile::tempdir().unwrap();
    let put = folder.path().join("put");
    std::fs::write(&put, "  a-token-of-putting\n").unwrap();
    let text = format!("[tokens]\nput_file = {put:?}\n");
    let settings = load(&text, &[("DEEPINFER_KVSTORE_TOKEN_ADMIN", "a-token-of-administering")]).unwrap();
    assert_eq!(settings.server.tokens[&Role::Put], b"a-token-of-putting");
    assert_eq!(settings.server.tokens[&Role::Admin], b"a-token-of-administering");
    let shown = format!("{settings:?}");
    assert!(!shown.contains("administering") && !shown.contains("97, 45, 116"), "{shown}");
    refused(&text, &[("DEEPINFER_KVSTORE_TOKEN_PUT", "short")], &["role put", "16 bytes"]);
    refused("[tokens]\nget_file = \"/nowhere\"", &[], &["tokens.get_file", "/nowhere"]);
    std::fs::write(&put, "\n").unwrap();
    refused(&text, &[], &["tokens.put_file", "holds no token"]);
    // Nor in what is said of a value that is wrong.
    let said = load("", &[("DEEPINFER_KVSTORE_TOKEN_PUT", "secret")]).err().unwrap().to_string();
    assert!(!said.contains("secret"), "{said}");
}

#[test]
fn media_have_what_belongs_to_them() {
    let settings = load("[media]\nkind = \"objects\"\ndirectory = \"/mnt/kv\"", &[]).unwrap();
    assert!(matches!(settings.media, MediaSettings::Objects(Where::Directory(path)) if path == Path::new("/mnt/kv")));
    refused("[media]\nkind = \"tape\"", &[], &["media.kind", "local, objects or striped"]);
    refused("[media]\nkind = \"objects\"", &[], &["media.directory", "media.s3"]);
    refused("[media]\nkind = \"objects\"\ndirectory = \"kv\"", &[], &["media.directory", "absolute"]);
    refused("[media]\ndirectory = \"/mnt/kv\"", &[], &["media.directory", "objects"]);
    refused("[media]\nhedge = 1", &[], &["media.hedge", "striped"]);
    refused("[media]\nkind = \"objects\"\nsegment_bytes = 1", &[], &["media.segment_bytes", "local"]);
    refused("[media]\nsegment_bytes = 1", &[], &["media.segment_bytes", "64KiB"]);
}

#[cfg(feature = "redis")]
#[test]
fn a_directory_joins_stores_over_one_back_end() {
    let text = |more: &str| format!("[media]\nkind = \"objects\"\ndirectory = \"/mnt/kv\"\n[directory]\n{more}");
    let one = "servers = [\"redis://user@10.0.0.5:6379\"]";
    let word = ("DEEPINFER_KVSTORE_DIRECTORY_PASSWORD", "hushhush");
    let settings = load(&text(one), &[word]).unwrap();
    assert!(!format!("{settings:?}").contains("hushhush"));
    let directory = settings.directory.unwrap();
    assert_eq!((directory.password.as_deref(), directory.cluster), (Some("hushhush"), false));
    assert_eq!((directory.timeout.as_millis(), directory.retry.as_secs()), (150, 1));
    let listed = ("DEEPINFER_KVSTORE_DIRECTORY_SERVERS", "redis://a:1,redis://b:2");
    let both = load(&text("timeout = \"20ms\"\nprefix = \"team-a\""), &[listed]).unwrap().directory.unwrap();
    assert_eq!((both.servers.len(), both.cluster, both.timeout.as_millis()), (2, true, 20));
    assert!(load(&text("servers = []"), &[]).unwrap().directory.is_none());
    assert!(load(&text("servers = [\"redis://a:1\"]\ncluster = true"), &[]).unwrap().directory.unwrap().cluster);
    refused(&text("cluster = false"), &[listed], &["directory.cluster"]);
    refused(&text("cluster = true"), &[], &["directory.cluster", "directory.servers"]);
    refused(&text(""), &[word], &["password", "directory.servers"]);
    refused(&text("servers = [\"redis://a:1\", \"http://b\"]"), &[], &["directory.servers[1]", "redis://host:port"]);
    refused(&text("servers = [\"redis://:hush@a:1\"]"), &[], &["directory.servers[0]", "password"]);
    let protected = "servers = [\"rediss://10.0.0.5:6379\"]";
    assert!(load(&text(protected), &[]).unwrap().directory.unwrap().authorities.is_none());
    refused(&text(&format!("{protected}\ntls_ca = \"/nowhere\"")), &[], &["directory.tls_ca", "/nowhere"]);
    refused(&text(&format!("{protected}\ntls_ca = \"/dev/null\"")), &[], &["directory.tls_ca", "no certificate"]);
    refused(&text(&format!("{one}\ntls_ca = \"/dev/null\"")), &[], &["directory.tls_ca", "rediss://"]);
    refused(&text("tls_ca = \"/dev/null\""), &[], &["directory.tls_ca", "directory.servers"]);
    refused(&text("servers = [\"rediss://a:1/#insecure\"]"), &[], &["directory.servers[0]", "rediss://host:port"]);
    refused(&text("servers = [\"rediss://a:1\", \"redis://b:1\"]"), &[], &["rediss://"]);
    refused(&text(&format!("{one}\nprefix = \"A:\"")), &[], &["directory.prefix"]);
    refused(&text(&format!("{one}\ntimeout = 0")), &[], &["directory.timeout"]);
    refused(&text(&format!("{one}\nretry = \"2m\"")), &[], &["directory.retry"]);
    refused(&text(&format!("{one}\npassword_file = \"/nowhere\"")), &[], &["directory.password_file", "/nowhere"]);
    refused(&format!("[directory]\n{one}"), &[], &["directory.servers", "objects", "local"]);
}

#[cfg(feature = "s3")]
#[test]
fn buckets_need_keys_which_come_from_the_environment() {
    let text = |more: &str| {
        format!("[media]\nkind = \"objects\"\ns3 = {{ endpoint = \"http://127.0.0.1:1\", bucket = \"kv1\"{more} }}")
    };
    let keys = [("DEEPINFER_KVSTORE_S3_ACCESS_KEY", "access"), ("DEEPINFER_KVSTORE_S3_SECRET_KEY", "hushhush")];
    let settings = load(&text(""), &keys).unwrap();
    assert!(!format!("{settings:?}").contains("hushhush"));
    let MediaSettings::Objects(Where::Bucket(config)) = settings.media else { panic!() };
    assert_eq!((config.access_key.as_str(), config.secret_key.as_str()), ("access", "hushhush"));
    load(&text(""), &[("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")]).unwrap();
    let own = ", access_key_env = \"DEEPINFER_KVSTORE_MINE\", secret_key_env = \"OTHER\"";
    load(&text(own), &[("DEEPINFER_KVSTORE_MINE", "a"), ("OTHER", "b")]).unwrap();
    refused(&text(own), &keys, &["media.s3.access_key_env", "DEEPINFER_KVSTORE_MINE"]);
    refused(&text(""), &[], &["media.s3.access_key_env", "AWS_ACCESS_KEY_ID"]);
    for bucket in ["ab", "a b c", "../kv", &"a".repeat(64)] {
        refused(&text("").replace("kv1", bucket), &keys, &["media.s3", "3 to 63"]);
    }
    refused(&text(", folder = \"../x\""), &keys, &["media.s3"]);
    refused(&text(", secret = \"x\""), &keys, &["media.s3", "unknown field `secret`"]);
    refused("[media]\nkind = \"objects\"\ns3 = { endpoint = \"http://x\" }", &keys, &["media.s3.bucket", "needed"]);
}

#[test]
fn stripes_need_exactly_twelve_places() {
    let text = |count: usize, more: &str| {
        let domains: Vec<String> = (0..count).map(|at| format!("\"/mnt/d{at}\"")).collect();
        format!("[media]\nkind = \"striped\"\ndomains = [{}]\n{more}", domains.join(", "))
    };
    let settings = load(&text(12, "min_domains = 10\nhedge = \"20ms\""), &[]).unwrap();
    let MediaSettings::Striped { domains, config, repair_every, .. } = settings.media else { panic!() };
    assert_eq!((domains.len(), config.min_domains, config.hedge.as_millis()), (12, 10, 20));
    assert_eq!(repair_every.as_secs(), 5);
    for count in [0, 11, 13] {
        refused(&text(count, ""), &[], &["media.domains", "exactly 12"]);
    }
    refused(&text(12, "min_domains = 9"), &[], &["media.min_domains"]);
    refused(&text(12, "hedge = 0"), &[], &["media.hedge"]);
    refused(&text(12, "").replace("/mnt/d7", "/mnt/d3"), &[], &["media.domains[7]", "same place as domain 3"]);
    refused(&text(12, "").replace("\"/mnt/d7\"", "5"), &[], &["media.domains[7]"]);
    refused(&text(12, "").replace("\"/mnt/d7\"", "{ bucket = 5 }"), &[], &["media.domains[7]"]);
    let listed: Vec<String> = (0..12).map(|at| format!("/d/{at}")).collect();
    let variables =
        [("DEEPINFER_KVSTORE_MEDIA_KIND", "striped"), ("DEEPINFER_KVSTORE_MEDIA_DOMAINS", &listed.join(","))];
    assert_eq!(load("", &variables).unwrap().media.kind(), "striped");
}

#[test]
fn an_agent_has_a_socket_a_store_and_memory() {
    let agent =
        |text: &str, variables: &[(&str, &str)]| load(&format!("[agent]\n{text}"), variables).map(|one| one.agent);
    let plain = agent("", &[("XDG_RUNTIME_DIR", "/run/user/7")]).unwrap();
    assert_eq!(plain.config.socket, Path::new("/run/user/7/deepinfer/agent.sock"));
    assert_eq!(plain.upstream.unwrap().addresses, [DEFAULT_LISTEN.parse().unwrap()]);
    assert!(agent("", &[]).unwrap().config.socket.starts_with("/tmp"));
    assert!(agent("upstream = \"own\"", &[]).unwrap().upstream.is_none());
    let two =
        agent("upstream = \"tcp://a:1,b:2\"", &[("DEEPINFER_KVSTORE_TOKEN_GET", "a-token-of-getting-it")]).unwrap();
    let roles = two.upstream.unwrap().roles;
    let token = |role| roles.iter().find(|(of, _)| *of == role).unwrap().1.clone();
    assert_eq!((token(Role::Get), token(Role::Put)), (Some(b"a-token-of-getting-it".to_vec()), None));
    refused("[agent]\nsocket = \"here\"", &[], &["agent.socket", "absolute"]);
    refused("[agent]\nupstream = \"ftp://x\"", &[], &["agent.upstream", "tcp://host:port"]);
    refused("[agent]\nfetchers = 0", &[], &["agent.fetchers"]);
    refused("[agent]\nlease = 0", &[], &["agent.lease"]);
    refused("[agent]\nmetrics = \"x\"", &[], &["agent.metrics"]);
    refused("[agent]\nupstream = \"own\"\ntls_ca = \"/x\"", &[], &["agent.tls_ca"]);
}

#[test]
fn sizes_of_an_agent_may_be_given_one_at_a_time() {
    let sizes = |text: &str| {
        let config = load(text, &[]).unwrap().agent.config;
        [config.arena_bytes, config.backlog_bytes, config.at_once].map(|bytes| bytes >> 20)
    };
    assert_eq!(sizes(""), [4096, 1024, 64]);
    assert_eq!(sizes("[agent]\narena = \"64GiB\""), [65536, 1024, 64]);
    assert_eq!(sizes("[agent]\narena = \"256MiB\""), [256, 128, 64]);
    assert_eq!(sizes("[agent]\narena = \"64MiB\""), [64, 32, 32]);
    assert_eq!(sizes("[agent]\nbacklog = \"32MiB\""), [4096, 32, 32]);
    assert_eq!(sizes("[agent]\nat_once = \"512MiB\""), [4096, 1024, 512]);
    let large = "[store]\nmax_object = \"100MiB\"\nbatch_bytes = \"110MiB\"";
    assert_eq!(sizes(large), [4096, 1024, 100]);
    // What does not fit says what would.
    refused("[agent]\narena = \"1MiB\"", &[], &["agent.arena: 1 MiB", "give 32 MiB", "store.max_object"]);
    refused("[agent]\nbacklog = \"3GiB\"", &[], &["agent.arena: 4 GiB", "give 6 GiB"]);
    refused("[agent]\nbacklog = \"1MiB\"", &[], &["agent.backlog: 1 MiB", "give 16 MiB"]);
    refused("[agent]\nat_once = 5", &[], &["agent.at_once: 5 bytes", "give 16 MiB"]);
    refused("[agent]\nat_once = \"2GiB\"", &[], &["agent.backlog: 1 GiB", "give 2 GiB"]);
}
