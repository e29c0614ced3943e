//! One type for both machines of a side, so that a test can run any of them. The first message decides which machine it is.

pub(super) mod decode {
    use std::time::Instant;

    use crate::{
        Begin, Limits,
        decode::{
            DecodeAction, PrefixFetch, PrefixFetchAction, RemotePrefill, RemotePrefillAction, RemotePrefilled,
        },
    };

    pub(crate) use crate::decode::DecodeInput as Input;
    pub(crate) type Action<T> = RemotePrefillAction<T>;

    #[derive(Clone, Debug)]
    pub(crate) enum DecodeHandoff {
        Prefill(RemotePrefill),
        Fetch(PrefixFetch),
    }

    impl DecodeHandoff {
        pub(crate) fn begin(
            begin: Begin,
            is_fetch: bool,
            num_layers: usize,
            limits: Limits,
            now: Instant,
        ) -> (DecodeHandoff, Vec<Action<u32>>) {
            if is_fetch {
                let (fetch, actions) = PrefixFetch::begin(begin, num_layers, limits, now);
                (DecodeHandoff::Fetch(fetch), widen(actions))
            } else {
                let (prefill, actions) = RemotePrefill::begin(begin, num_layers, limits, now);
                (DecodeHandoff::Prefill(prefill), actions)
            }
        }

        pub(crate) fn on(&mut self, input: Input<u32>, now: Instant) -> Vec<Action<u32>> {
            match self {
                DecodeHandoff::Prefill(prefill) => prefill.on(input, now),
                DecodeHandoff::Fetch(fetch) => widen(fetch.on(input, now)),
            }
        }

        pub(crate) fn request_ended(&mut self, now: Instant) -> Vec<Action<u32>> {
            match self {
                DecodeHandoff::Prefill(prefill) => prefill.request_ended(now),
                DecodeHandoff::Fetch(_) => panic!("a fetch has no first token"),
            }
        }

        pub(crate) fn deadline(&self) -> Option<Instant> {
            match self {
                DecodeHandoff::Prefill(prefill) => prefill.deadline(),
                DecodeHandoff::Fetch(fetch) => fetch.deadline(),
            }
        }

        pub(crate) fn is_over(&self) -> bool {
            match self {
                DecodeHandoff::Prefill(prefill) => prefill.is_over(),
                DecodeHandoff::Fetch(fetch) => fetch.is_over(),
            }
        }
    }

    fn widen(actions: Vec<PrefixFetchAction>) -> Vec<Action<u32>> {
        use DecodeAction as A;
        let widen = |action| match action {
            A::Send(message) => A::Send(message),
            A::Reserve { num_tokens } => A::Reserve { num_tokens },
            A::FirstToken(never) => match never {},
            A::Verify(pieces) => A::Verify(pieces),
            A::Revoke(generation) => A::Revoke(generation),
            A::WriterStopped(generation) => A::WriterStopped(generation),
            A::Finish(result) => A::Finish(result.map(RemotePrefilled::Committed)),
            A::Close => A::Close,
        };
        actions.into_iter().map(widen).collect()
    }
}

pub(super) mod prefill {
    use std::{ops::Range, time::Instant};

    use baton_kv_layout::BlockId;
    use baton_request::Failure;

    use crate::{
        AccessKey, DecodeMessage, HandoffError, Limits, PieceWrite, PrefillMessage, PushError, Pushed,
        RouteError, TransportOffer,
        prefill::{
            CachedHandoff, ComputeInput, ComputedHandoff, HandedOver, Opening, OwnSide, PrefillAction,
            PrefillInput,
        },
    };

    #[derive(Clone, Debug)]
    pub(crate) enum Input {
        Message(DecodeMessage),
        StreamClosed(String),
        Progress,
        Started,
        Held { blocks: Vec<BlockId> },
        Ready { layers: Range<usize>, first_block_idx: usize, blocks: Vec<BlockId> },
        FirstToken(u32),
        Fail(Failure),
        Routed(Result<(), RouteError>),
        Pushed(Result<Pushed, PushError>),
        Idle,
        Tick,
    }

    #[derive(Clone, Debug, PartialEq)]
    pub(crate) enum Action {
        Compute,
        Hold,
        Route { access_key: AccessKey, offers: Vec<TransportOffer> },
        Push(Vec<PieceWrite>),
        Send(PrefillMessage<u32>),
        Finish(Result<HandedOver, HandoffError>),
        Stop,
        Release,
        Close,
    }

    #[derive(Clone, Debug)]
    pub(crate) enum PrefillHandoff {
        Opening(Opening),
        Computed(ComputedHandoff),
        Cached(CachedHandoff),
        Declined,
    }

    impl PrefillHandoff {
        pub(crate) fn new(
            incarnation: u64,
            block_size: usize,
            num_layers: usize,
            limits: Limits,
            now: Instant,
        ) -> PrefillHandoff {
            let own = OwnSide { incarnation, block_size, num_layers };
            PrefillHandoff::Opening(Opening::new(own, limits, now))
        }

        pub(crate) fn on(&mut self, input: Input, now: Instant) -> Vec<Action> {
            match self {
                PrefillHandoff::Opening(opening) => {
                    let opening = opening.clone();
                    let (next, actions) = match input {
                        Input::Message(DecodeMessage::Begin(begin)) => {
                            let begun = opening.begin(&begin, now).map(PrefillHandoff::Computed);
                            (begun, vec![Action::Compute])
                        }
                        Input::Message(DecodeMessage::Fetch(begin)) => {
                            let begun = opening.fetch(&begin, now).map(PrefillHandoff::Cached);
                            (begun, vec![Action::Hold])
                        }
                        input => match compute_input(input) {
                            ComputeInput::Other(input) => {
                                (opening.on(input, now).map(PrefillHandoff::Opening), vec![])
                            }
                            // The engine does not have the request yet.
                            _ => return vec![],
                        },
                    };
                    let (next, actions) = match next {
                        Ok(next) => (next, actions),
                        Err(over) => (PrefillHandoff::Declined, flatten(over, |never| match never {})),
                    };
                    *self = next;
                    actions
                }
                PrefillHandoff::Computed(handoff) => {
                    flatten(handoff.on(compute_input(input), now), |outcome| outcome)
                }
                PrefillHandoff::Cached(handoff) => {
                    let actions = match input {
                        Input::Held { blocks } => handoff.held(&blocks, now),
                        input => match compute_input(input) {
                            ComputeInput::Other(input) => handoff.on(input, now),
                            // Nothing is computed for it.
                            _ => vec![],
                        },
                    };
                    flatten(actions, |()| HandedOver::Committed)
                }
                PrefillHandoff::Declined => vec![],
            }
        }

        pub(crate) fn deadline(&self) -> Option<Instant> {
            match self {
                PrefillHandoff::Opening(opening) => Some(opening.deadline()),
                PrefillHandoff::Computed(handoff) => handoff.deadline(),
                PrefillHandoff::Cached(handoff) => handoff.deadline(),
                PrefillHandoff::Declined => None,
            }
        }

        pub(crate) fn is_over(&self) -> bool {
            self.deadline().is_none()
        }
    }

    fn compute_input(input: Input) -> ComputeInput<u32> {
        use ComputeInput as C;
        use PrefillInput as P;
        match input {
            Input::Progress => C::Progress,
            Input::Started => C::Started,
            Input::Ready { layers, first_block_idx, blocks } => C::Ready { layers, first_block_idx, blocks },
            Input::FirstToken(token) => C::FirstToken(token),
            Input::Held { .. } => panic!("nothing is held for a handoff that is computed"),
            Input::Message(message) => C::Other(P::Message(message)),
            Input::StreamClosed(why) => C::Other(P::StreamClosed(why)),
            Input::Fail(failed) => C::Other(P::Fail(failed)),
            Input::Routed(result) => C::Other(P::Routed(result)),
            Input::Pushed(result) => C::Other(P::Pushed(result)),
            Input::Idle => C::Other(P::Idle),
            Input::Tick => C::Other(P::Tick),
        }
    }

    fn flatten<E>(actions: Vec<PrefillAction<u32, E>>, outcome: impl Fn(E) -> HandedOver) -> Vec<Action> {
        let flatten = |action| match action {
            PrefillAction::Route { access_key, offers } => Action::Route { access_key, offers },
            PrefillAction::Push(pieces) => Action::Push(pieces),
            PrefillAction::Send(message) => Action::Send(message),
            PrefillAction::Finish(result) => Action::Finish(result.map(&outcome)),
            PrefillAction::Stop => Action::Stop,
            PrefillAction::Release => Action::Release,
            PrefillAction::Close => Action::Close,
        };
        actions.into_iter().map(flatten).collect()
    }
}
