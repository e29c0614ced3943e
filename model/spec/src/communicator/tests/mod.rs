mod suite;

use super::ThreadCommunicator;

#[test]
fn threads_meet_the_contract() {
    suite::run(ThreadCommunicator::group);
}
