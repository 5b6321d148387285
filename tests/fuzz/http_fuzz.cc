// Fuzzes how the daemon reads the head of an HTTP request that anybody may have sent, and what it
// answers.
#include "daemon/http/message.h"
#include "tests/fuzz/fuzz.h"

namespace prefixd::fuzz {
namespace {

using namespace prefixd::daemon;

std::string TextOf(FuzzedDataProvider& in) { return in.ConsumeRemainingBytesAsString(); }

// The bounds that a request keeps to, and an answer in the form of HTTP either way.
void CheckRead(const RequestReader& reader) {
  if (!reader.done()) return;
  const bool head = reader.request() && reader.request()->head;
  HttpAnswer answer = reader.refusal();
  if (reader.request()) {
    const HttpRequest& request = *reader.request();
    FUZZ_EXPECT(request.path.starts_with('/') && request.path.find('?') == std::string::npos);
    FUZZ_EXPECT(request.path.size() + request.host.size() <= kMaxHttpHeadBytes);
    FUZZ_EXPECT(request.host.find_first_of("\r\n") == std::string::npos);
    FUZZ_EXPECT(request.path.find_first_of(" \r\n") == std::string::npos);
    FUZZ_EXPECT(!request.token || request.token->size() <= kMaxHttpHeadBytes);
    answer = TextAnswer(200, request.path);
  } else {
    FUZZ_EXPECT(answer.status >= 400 && answer.status < 600);
  }
  const std::string text = WriteAnswer(answer, head);
  const size_t end = text.find("\r\n\r\n");
  FUZZ_EXPECT(text.starts_with("HTTP/1.1 ") && end != std::string::npos);
  FUZZ_EXPECT(text.size() - end - 4 == (head ? 0 : answer.body.size()));
}

RequestReader Read(std::string_view bytes, size_t at_a_time) {
  RequestReader reader;
  while (!bytes.empty() && !reader.done()) {
    const std::string_view piece = bytes.substr(0, at_a_time);
    reader.Take(piece);
    bytes.remove_prefix(piece.size());
  }
  return reader;
}

// How the bytes arrive makes no difference to what is asked.
void CheckPieces(const std::string& bytes, size_t at_a_time) {
  const RequestReader whole = Read(bytes, bytes.size()), pieces = Read(bytes, at_a_time);
  CheckRead(whole);
  CheckRead(pieces);
  if (!whole.done() || !pieces.done()) return;
  if (!whole.request() || !pieces.request()) return;
  FUZZ_EXPECT(whole.request()->path == pieces.request()->path);
  FUZZ_EXPECT(whole.request()->host == pieces.request()->host);
  FUZZ_EXPECT(whole.request()->token == pieces.request()->token);
  FUZZ_EXPECT(whole.request()->head == pieces.request()->head);
}

}  // namespace

void RunOne(FuzzedDataProvider& in) {
  const auto kind = Whole<uint8_t>(in);
  const size_t at_a_time = 1 + Whole<uint8_t>(in);
  switch (kind % 3) {
    case 0:
      CheckPieces(TextOf(in), at_a_time);
      break;
    case 1:  // a well-formed request with a field of the fuzzer's own
      CheckPieces("GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + TextOf(in) + "\r\n\r\n",
                  at_a_time);
      break;
    case 2: {  // a token; what is decoded is not longer than what was sent
      const std::string token = TextOf(in);
      const bool basic = kind % 2 == 0;
      CheckPieces("HEAD /status.json?x HTTP/1.0\r\nAuthorization: " +
                      std::string(basic ? "Basic " : "Bearer ") + token + "\r\n\r\n",
                  at_a_time);
      break;
    }
  }
}

}  // namespace prefixd::fuzz
