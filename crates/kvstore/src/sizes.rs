//! Numbers of bytes as people read them.

/// `64 GiB`, `1.5 MiB`, `100 bytes`.
pub fn in_words(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let Some((unit, shift)) = units.into_iter().find(|(_, shift)| bytes >> shift > 0) else {
        return format!("{bytes} bytes");
    };
    let tenths = format!("{:.1}", bytes as f64 / (1u64 << shift) as f64);
    format!("{} {unit}", tenths.trim_end_matches(".0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        for (bytes, words) in
            [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (3 << 19, "1.5 MiB"), (64 << 30, "64 GiB")]
        {
            assert_eq!(in_words(bytes), words);
        }
    }
}
