//! Bytes and objects of each tenant, counted where entries come and go.

use std::collections::BTreeMap;

use crate::key::Kind;
use crate::object::TenantId;

/// What somebody uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of objects, without what the media add.
    pub bytes: u64,
    /// Blocks that can be read.
    pub blocks: u64,
    /// Slices.
    pub slices: u64,
}

impl Usage {
    fn count(&mut self, kind: Kind) -> &mut u64 {
        match kind {
            Kind::Block => &mut self.blocks,
            Kind::Slice => &mut self.slices,
        }
    }

    fn add(&mut self, kind: Kind, len: u32) {
        self.bytes += u64::from(len);
        *self.count(kind) += 1;
    }

    fn sub(&mut self, kind: Kind, len: u32) {
        self.bytes -= u64::from(len);
        *self.count(kind) -= 1;
    }

    fn is_nothing(&self) -> bool {
        self.blocks == 0 && self.slices == 0
    }
}

#[derive(Debug, Default)]
pub(super) struct Usages {
    total: Usage,
    each: BTreeMap<TenantId, Usage>,
}

impl Usages {
    pub(super) fn add(&mut self, tenant: TenantId, kind: Kind, len: u32) {
        self.total.add(kind, len);
        self.each.entry(tenant).or_default().add(kind, len);
    }

    pub(super) fn sub(&mut self, tenant: TenantId, kind: Kind, len: u32) {
        self.total.sub(kind, len);
        if let Some(usage) = self.each.get_mut(&tenant) {
            usage.sub(kind, len);
            if usage.is_nothing() {
                self.each.remove(&tenant);
            }
        }
    }

    pub(super) fn of(&self, tenant: TenantId) -> Usage {
        self.each.get(&tenant).copied().unwrap_or_default()
    }

    pub(super) fn total(&self) -> Usage {
        self.total
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (TenantId, Usage)> {
        self.each.iter().map(|(&tenant, &usage)| (tenant, usage))
    }
}
