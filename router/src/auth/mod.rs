//! The layers in front of every route and method: they admit callers by keys and within quotas, and pages by their origins.
//!
//! Handlers do not know them. They find the caller in the request's [`RequestArrival`].

mod access;
mod live_keys;
mod refusal;

use std::{sync::Arc, time::Instant};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    middleware::{Next, from_fn_with_state},
    response::Response,
};
use baton_keys::{Allowance, KeyHolder};
use baton_router_core::{Caller, RequestArrival};
use baton_router_port::{HeldBody, PagePolicy};
use http::{HeaderMap, HeaderName, HeaderValue, header};

use access::Access;
pub(crate) use live_keys::LiveKeys;
use refusal::Refusal;

/// Anthropic's clients send their key in it.
const X_API_KEY: &str = "x-api-key";

struct Guard {
    keys: Arc<LiveKeys>,
    has_public_metrics: bool,
}

/// Puts the layer around all routes that the router has so far.
pub(crate) fn guard<S>(router: Router<S>, keys: Arc<LiveKeys>, has_public_metrics: bool) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
{
    router.layer(from_fn_with_state(Arc::new(Guard { keys, has_public_metrics }), admit))
}

/// Puts a layer around all routes that refuses what other pages in a browser send.
pub(crate) fn guard_from_pages<S>(router: Router<S>, policy: PagePolicy) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
{
    router.layer(from_fn_with_state(Arc::new(policy), check_page))
}

async fn check_page(State(policy): State<Arc<PagePolicy>>, request: Request, next: Next) -> Response {
    if let Err(refusal) = policy.check(&request) {
        return Refusal::from(refusal).answer(&request);
    }
    next.run(request).await
}

async fn admit(State(guard): State<Arc<Guard>>, mut request: Request, next: Next) -> Response {
    let access = Access::of(request.uri().path(), guard.has_public_metrics);
    let shown = take_key(request.headers_mut());
    let holder = guard.keys.find(shown.as_deref());
    if access == Access::Open {
        if let Ok(holder) = holder {
            set_caller(&mut request, holder);
        }
        return next.run(request).await;
    }
    let allowed = holder.and_then(|holder| access.check(holder.role()).map(|()| holder));
    let holder = match allowed {
        Ok(holder) => holder,
        Err(refusal) => return refusal.answer(&request),
    };
    let permit = match holder.begin_call(Instant::now()) {
        Ok(permit) => permit,
        Err(exceeded) => {
            let mut answer = Refusal::from(exceeded).answer(&request);
            add_allowances(answer.headers_mut(), &holder);
            return answer;
        }
    };
    // The others end by themselves, soon.
    let end = access.is_endless().then(|| guard.keys.clone().revoked(holder.clone()));
    set_caller(&mut request, holder.clone());
    let mut response = next.run(request).await;
    add_allowances(response.headers_mut(), &holder);
    response.map(|body| Body::new(HeldBody::new(body, permit, end)))
}

/// The key that a caller shows. It is removed, so that nothing after this layer can log it.
fn take_key(headers: &mut HeaderMap) -> Option<String> {
    let authorization = headers.remove(header::AUTHORIZATION);
    let x_api_key = headers.remove(X_API_KEY);
    let authorization = authorization.as_ref().and_then(|value| value.to_str().ok());
    let bearer = authorization.and_then(|text| {
        let (scheme, key) = text.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    let key = bearer.or_else(|| x_api_key.as_ref()?.to_str().ok());
    key.filter(|key| !key.is_empty()).map(str::to_owned)
}

fn set_caller(request: &mut Request, holder: KeyHolder) {
    let arrival = request.extensions_mut().get_mut::<RequestArrival>().expect("the edge observes every call");
    arrival.caller = Caller::Holder(holder);
}

/// What is left of the key's quotas, in OpenAI's headers.
fn add_allowances(headers: &mut HeaderMap, holder: &KeyHolder) {
    let (requests, tokens) = holder.allowances(Instant::now());
    for (kind, allowance) in [("requests", requests), ("tokens", tokens)] {
        let Some(Allowance { limit, remaining, reset }) = allowance else { continue };
        let reset = format!("{:.3}s", reset.as_secs_f64());
        for (what, value) in
            [("limit", limit.to_string()), ("remaining", remaining.to_string()), ("reset", reset)]
        {
            let name = HeaderName::try_from(format!("x-ratelimit-{what}-{kind}")).expect("fixed words");
            headers.insert(name, HeaderValue::try_from(value).expect("digits"));
        }
    }
}
