//! How many connections there may be, in all and of one address.
//!
//! *Invariants:* an address has three quarters of the room at most, so that no client alone keeps all others out.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::rc::Rc;

use rustix::process::{Resource, getrlimit};

/// More are never taken; fewer where descriptors are scarce: a connection that is passed on has three.
const MOST: usize = 16_384;
const OTHER_DESCRIPTORS: usize = 100;
const PER_CONNECTION: usize = 2;

pub(super) struct Crowd {
    most: usize,
    open: RefCell<(usize, HashMap<IpAddr, usize>)>,
}

/// A connection that counts, until it is dropped.
pub(super) struct Place {
    crowd: Rc<Crowd>,
    address: IpAddr,
}

impl Crowd {
    /// As many as the process has descriptors for.
    pub(super) fn new() -> Rc<Crowd> {
        let limit = getrlimit(Resource::Nofile).current;
        let limit = limit
            .and_then(|limit| usize::try_from(limit).ok())
            .unwrap_or(usize::MAX);
        Self::of(MOST.min(limit.saturating_sub(OTHER_DESCRIPTORS) / PER_CONNECTION))
    }

    fn of(most: usize) -> Rc<Crowd> {
        let open = RefCell::default();
        Rc::new(Crowd { most, open })
    }

    /// None: there is no room for it.
    pub(super) fn enter(self: &Rc<Self>, address: IpAddr) -> Option<Place> {
        let address = address.to_canonical();
        let (all, by_address) = &mut *self.open.borrow_mut();
        let own = by_address.get(&address).copied().unwrap_or(0);
        (*all < self.most && own < (self.most * 3).div_ceil(4)).then_some(())?;
        *all += 1;
        by_address.insert(address, own + 1);
        let crowd = Rc::clone(self);
        Some(Place { crowd, address })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let (all, by_address) = &mut *self.crowd.open.borrow_mut();
        *all -= 1;
        if let Some(own) = by_address.get_mut(&self.address) {
            *own -= 1;
            if *own == 0 {
                by_address.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_address_keeps_all_others_out() {
        let crowd = Crowd::of(8);
        let [one, other] = [[1, 2, 3, 4], [5, 6, 7, 8]].map(IpAddr::from);
        let mut places: Vec<_> = (0..9).filter_map(|_| crowd.enter(one)).collect();
        assert_eq!(places.len(), 6);
        places.extend((0..9).filter_map(|_| crowd.enter(other)));
        assert_eq!(places.len(), 8);
        drop(places.drain(..2));
        assert!(crowd.enter(one).is_some());
        places.clear();
        assert_eq!(
            (0..9).filter_map(|_| crowd.enter(other)).count(),
            9,
            "each leaves at once"
        );
        assert!(crowd.open.borrow().1.is_empty());
    }
}
