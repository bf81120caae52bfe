//! Measures the store beside what the machine under it does, for `deepinfer kvstore bench`.
//!
//! Owns: what is measured and by which counting rule. Never touches: who asks for it, how figures are shown.
//!
//! Two sides take turns within each of [`ROUNDS`] rounds; a figure is the median of the rounds, a ratio the median of their ratios, which a
//! busy machine disturbs least. A first round only warms.

mod disk;
mod lookup;
mod shared;
mod stripes;
mod upkeep;

use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::key::{Key, Kind, ObjectId};
use crate::object::{Class, Meta, TenantId};

/// Rounds of each measurement.
pub const ROUNDS: usize = 5;

/// Bytes of the objects: a state slice, and a block of 128 tokens, of a full DeepSeek-V4.1.
pub const SIZES: [usize; 2] = [1_415_040, 113_920];

/// What can be measured, in the order in which it is.
pub const PARTS: &[&str] = &["put", "get", "shared_memory", "check", "upkeep", "index", "erasure", "slow_domain"];

/// One figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// What was measured.
    pub name: String,
    /// `GB/s`, `us`, `ms` or `B`.
    pub unit: &'static str,
    /// Median of the rounds.
    pub value: f64,
    /// What stands beside it.
    pub beside: Option<f64>,
    /// This figure over the other, the median of the rounds, with the least and the greatest.
    pub ratio: Option<[f64; 3]>,
}

/// How much is measured.
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    /// A directory of the disk in question; what is written there is deleted.
    pub dir: &'a Path,
    /// Entries of the index.
    pub entries: u64,
    /// Bytes of a round on the disk, about.
    pub round_bytes: u64,
}

/// Runs one of [`PARTS`].
///
/// # Errors
/// [`Error::Invalid`] for a part or a size that there is none of, and those of disks and sockets.
pub fn run(part: &str, plan: &Plan<'_>) -> Result<Vec<Figure>, Error> {
    if !(1000..=100_000_000).contains(&plan.entries) {
        return Err(Error::Invalid(format!("{} entries: give 1000 to 100000000", plan.entries)));
    }
    if !(8 << 20..=8 << 30).contains(&plan.round_bytes) {
        return Err(Error::Invalid(format!("{} bytes a round: give 8 MiB to 8 GiB", plan.round_bytes)));
    }
    let folder = Folder::new(plan.dir)?;
    match part {
        "put" => disk::put(&folder.0, plan.round_bytes),
        "get" => disk::get(&folder.0, plan.round_bytes),
        "shared_memory" => shared::get(&folder.0, plan.round_bytes),
        "check" => lookup::check(&folder.0),
        "upkeep" => upkeep::check(&folder.0),
        "index" => lookup::index(plan.entries),
        "erasure" => stripes::code(),
        "slow_domain" => stripes::slow_domain(&folder.0),
        other => Err(Error::Invalid(format!("{other:?} is no part of the bench: {}", PARTS.join(", ")))),
    }
}

/// A directory that goes with it.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(below: &Path) -> Result<Self, Error> {
        let mut id = [0; 8];
        getrandom::fill(&mut id).map_err(|error| Error::Unavailable(format!("no random numbers: {error}")))?;
        let path = below.join(format!("kvstore-bench-{:016x}", u64::from_le_bytes(id)));
        std::fs::create_dir(&path).map_err(Error::io(format!("create {}", path.display())))?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be deleted now is seen by whoever looks there.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Runs both sides in turn, the first of a round changing: bytes a second of each, and their ratio.
fn beside(
    name: String,
    bytes: usize,
    mut ours: impl FnMut() -> Result<(), Error>,
    mut theirs: impl FnMut() -> Result<(), Error>,
) -> Result<Figure, Error> {
    let rate = |side: &mut dyn FnMut() -> Result<(), Error>| {
        let begun = Instant::now();
        side()?;
        Ok::<_, Error>(bytes as f64 / begun.elapsed().as_secs_f64() / 1e9)
    };
    let (mut our, mut their) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let pair = if round % 2 == 0 {
            let first = rate(&mut ours)?;
            (first, rate(&mut theirs)?)
        } else {
            let first = rate(&mut theirs)?;
            (rate(&mut ours)?, first)
        };
        if round > 0 {
            our.push(pair.0);
            their.push(pair.1);
        }
    }
    Ok(compared(name, "GB/s", &our, &their))
}

fn compared(name: String, unit: &'static str, ours: &[f64], theirs: &[f64]) -> Figure {
    let ratios: Vec<f64> = ours.iter().zip(theirs).map(|(our, their)| our / their).collect();
    let (least, most) = ratios.iter().fold((f64::MAX, 0f64), |(least, most), &one| (least.min(one), most.max(one)));
    Figure {
        name,
        unit,
        value: median(ours),
        beside: Some(median(theirs)),
        ratio: Some([median(&ratios), least, most]),
    }
}

/// Microseconds of a call: the median over `calls` in each round, then over the rounds.
fn micros(name: String, calls: usize, mut call: impl FnMut() -> Result<(), Error>) -> Result<Figure, Error> {
    let mut rounds = Vec::with_capacity(ROUNDS);
    for round in 0..=ROUNDS {
        let mut times = Vec::with_capacity(calls);
        for _ in 0..calls {
            let begun = Instant::now();
            call()?;
            times.push(begun.elapsed().as_secs_f64() * 1e6);
        }
        if round > 0 {
            rounds.push(median(&times));
        }
    }
    Ok(Figure { name, unit: "us", value: median(&rounds), beside: None, ratio: None })
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// A key as a hash would spread it.
fn key(number: u64) -> Key {
    let mut word = u128::from(number).wrapping_add(0x9e37_79b9_7f4a_7c15);
    for _ in 0..3 {
        word = (word ^ (word >> 67)).wrapping_mul(0xda94_2042_e4dd_58b5_9e37_79b9_7f4a_7c15);
    }
    Key(word ^ (word >> 64))
}

fn meta(number: u64, parent: Option<u64>, len: usize, checksum: u64) -> Meta {
    Meta {
        id: ObjectId { kind: Kind::Block, key: key(number) },
        parent: parent.map(key),
        tenant: TenantId(0),
        class: Class::Chat,
        len: len as u32,
        checksum,
        written: 0,
    }
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at.wrapping_mul(2_654_435_761) >> 8) as u8).collect()
}

/// What a bench expects of its own objects.
fn must(is: bool, what: &str) -> Result<(), Error> {
    if is { Ok(()) } else { Err(Error::Unavailable(format!("the bench could not {what}"))) }
}

/// Small objects, for words.
fn shown(len: usize) -> String {
    if len >= 1_000_000 { format!("{:.1} MB", len as f64 / 1e6) } else { format!("{:.0} kB", len as f64 / 1e3) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_part_gives_figures_and_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let plan = Plan { dir: dir.path(), entries: 2000, round_bytes: 8 << 20 };
        for part in PARTS {
            let figures = run(part, &plan).unwrap();
            assert!(!figures.is_empty());
            for figure in figures {
                assert!(figure.value.is_finite() && figure.value > 0.0, "{figure:?}");
                assert!(
                    figure.ratio.is_none_or(|[middle, least, most]| least <= middle && middle <= most),
                    "{figure:?}"
                );
            }
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(run("speed", &plan).is_err() && run("index", &Plan { entries: 1, ..plan.clone() }).is_err());
        assert!(run("put", &Plan { dir: Path::new("/nowhere"), ..plan }).is_err());
    }

    #[test]
    fn a_ratio_is_the_median_of_the_rounds() {
        let figure = compared("x".into(), "GB/s", &[1.0, 2.0, 9.0], &[2.0, 2.0, 3.0]);
        assert_eq!((figure.value, figure.beside, figure.ratio), (2.0, Some(2.0), Some([1.0, 0.5, 3.0])));
    }
}
