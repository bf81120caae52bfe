//! GF(2⁸) with the polynomial x⁸ + x⁴ + x³ + x² + 1 (0x11d), in which 2 generates every element but 0.

/// 2·a, bit by bit.
pub const fn double(a: u8) -> u8 {
    (a << 1) ^ (0x1d & 0u8.wrapping_sub(a >> 7))
}

/// a·b: b's bits say which doublings of a to add.
pub const fn product(mut a: u8, mut b: u8) -> u8 {
    let (mut sum, mut bit) = (0, 0);
    // All eight bits always: no branch on data, so that a loop over bytes becomes vectors.
    while bit < 8 {
        sum ^= a & 0u8.wrapping_sub(b & 1);
        a = double(a);
        b >>= 1;
        bit += 1;
    }
    sum
}

/// 2ⁿ; since 2²⁵⁵ = 1, 2⁻ⁿ is `power(255 - n)`.
pub const fn power(n: usize) -> u8 {
    let (mut value, mut left) = (1, n % 255);
    while left > 0 {
        value = double(value);
        left -= 1;
    }
    value
}

/// 1/a = a²⁵⁴ = a²·a⁴·…·a¹²⁸; 0 for 0.
pub const fn inverse(mut a: u8) -> u8 {
    let (mut value, mut squarings) = (1, 0);
    while squarings < 7 {
        a = product(a, a);
        value = product(value, a);
        squarings += 1;
    }
    value
}
