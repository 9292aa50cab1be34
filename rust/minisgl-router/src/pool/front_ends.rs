//! What a pool knows of a front end.

use minisgl_gateway::message::ToEngine;

use super::requests::ById;

/// Of the name in its hello.
const MAX_NAME: usize = 64;

pub(super) struct FrontEnd {
    pub(super) name: String,
    pub(super) greeted: bool,
    last_id: i64,
    /// Its requests that have not ended: the pool's ids by its own.
    pub(super) live: ById<i64>,
}

impl FrontEnd {
    pub(super) fn new(number: u32) -> Self {
        Self {
            name: format!("front end {number}"),
            greeted: false,
            last_id: -1,
            live: ById::default(),
        }
    }

    pub(super) fn hello(&mut self, name: &str) {
        self.name = name.chars().take(MAX_NAME).collect();
        self.greeted = true;
    }

    /// Why it must go, if it may not say this now.
    pub(super) fn check(&mut self, message: &ToEngine) -> Result<(), String> {
        if !self.greeted && !matches!(message, ToEngine::Hello { .. }) {
            return Err("the first message of a connection must be hello".to_owned());
        }
        if let ToEngine::AddRequest { req_id, .. } = *message {
            let last_id = self.last_id;
            if req_id <= last_id {
                return Err(format!(
                    "request id {req_id} does not lie above the last one, {last_id}"
                ));
            }
            self.last_id = req_id;
        }
        Ok(())
    }
}
