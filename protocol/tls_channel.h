// Declares what libprefixd-tls.so gives a client: TLS over a socket that the client connected
// (client_lib/open_tls.cc loads it; client_lib/tls/ is it). Both must come from one build: C++
// values cross between them.
//
// Thread-safety: one thread at a time uses a channel.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "prefixd/result.h"
#include "prefixd/version.h"

namespace prefixd {

// What one attempt came to. Nothing here waits.
struct TlsStep {
  size_t bytes = 0;
  short wants = 0;  // the event of poll(2) to wait for before the next attempt; 0: it is done
};

class TlsChannel {
 public:
  virtual ~TlsChannel() = default;  // says goodbye to the other side if that does not wait

  // kFailedPrecondition: the other side is not who it should be, or speaks no TLS; kUnavailable: it
  // went away.
  virtual Result<TlsStep> Handshake() = 0;
  // `bytes` were read or written, at least one unless it is to be tried again. kUnavailable: the
  // other side ended the connection.
  virtual Result<TlsStep> Read(std::span<std::byte> out) = 0;
  virtual Result<TlsStep> Write(std::span<const std::byte> bytes) = 0;
  // Done: Read would return something, or fail.
  virtual Result<TlsStep> Peek() = 0;
};

struct TlsPeer {
  std::string host;         // a name or an address that the certificate must bear
  std::string ca;           // PEM file of who may sign it; "": those that the system trusts
  std::string certificate;  // PEM files of this side, or "", if the other side asks who it is
  std::string key;
};

struct TlsEntry {
  const char* version;  // PREFIXD_VERSION of the library; the client checks it first
  // `socket` is connected, does not block, and outlives the channel. kInvalidArgument: a file that
  // cannot be used.
  Result<std::unique_ptr<TlsChannel>> (*make)(int socket, const TlsPeer& peer);
};

inline constexpr char kTlsLibrary[] = "libprefixd-tls.so." PREFIXD_SOVERSION;
inline constexpr char kTlsSymbol[] = "prefixd_tls_entry";

}  // namespace prefixd

extern "C" const prefixd::TlsEntry* prefixd_tls_entry();
